"""Mutants of what becomes of a call's arrays, and of host arrays' reduction."""

from __future__ import annotations

from tests.mutants import Mutant, unit

ARRAYS, OPERANDS, PROTOCOLS = (
    "ipcreduce/arrays/views.py",
    "ipcreduce/arrays/operands.py",
    "ipcreduce/cuda/array_protocols.py",
)
BUCKETS = "ipcreduce/buckets.py"
TORCH, TENSORS = "ipcreduce/cuda/torch_runtime.py", "ipcreduce/cuda/torch_tensors.py"
TORCH_LISTS = "ipcreduce/cuda/torch_lists.py"
SHARED, NUMERICS = "ipcreduce/host/shared.py", "ipcreduce/dtypes.py"
KINDS = "ipcreduce/dtypes.py"
SWEEP = "mpirun -n 2 tests.simulated tests/gpu/sweep.py --cases 1 --largest"  # its first case is
STRIDED_OUT, SHIFTED_OUT = f"{SWEEP} 300 --seed 1680", f"{SWEEP} 2000000 --smallest 1500000 --seed 127"
WRONG_CALLS = "mpirun -n 2 tests.simulated tests/gpu/bad_calls.py"


def tensors(scenario: str) -> str:
    """The command of a scenario of PyTorch's tensors."""
    return f"mpirun -n 2 tests.sim.scenarios {scenario}"


MUTANTS = [
    Mutant(
        "an array with units counts as a plain one",
        "ipcreduce/arrays/host_operands.py",
        "        views.check_plain(array, np.ndarray, what)\n",
        "        pass\n",
        unit("host_operands", "a_subclass_that_computes_in_its_own_way_is_refused"),
    ),
    Mutant(
        "the protocols that an object only hands on count as its own",
        PROTOCOLS,
        "    own = attributes(type(array))\n",
        "    if hasattr(array, name):\n        return True\n    own = attributes(type(array))\n",
        unit("host_operands", "an_object_that_only_hands_on_protocols_is_refused"),
    ),
    Mutant(
        "the all-reduce of a bucket does not wait for its gradients",
        BUCKETS,
        "        self._stream.wait_stream(cuda.current_stream(tensor.device))\n",
        "",
        tensors("buckets_behind_the_gradients"),
    ),
    Mutant(
        "a bucket that is dropped may be reused while it is reduced",
        BUCKETS,
        "        tensor.record_stream(self._stream)",
        "        #",
        tensors("a_bucket_that_is_dropped"),
    ),
    Mutant(
        "nobody hears of a backward pass that raises",
        BUCKETS,
        "queue_callback(finished)\n            return\n",
        "queue_callback(finished)\n",
        tensors("a_backward_pass_that_raises"),
    ),
    Mutant(
        "a recording keeps a tensor, and not its memory",
        ARRAYS,
        "tensor if ordered else tensor.detach()",
        "tensor",
        tensors("other_memory_under_a_recorded_tensor"),
    ),
    Mutant(
        "the address check asks the protocols of a tensor that requires grad",
        ARRAYS,
        "    if torch_runtime.is_plain_type(kind):\n",
        "    if False:\n",
        tensors("addresses_of_weights"),
    ),
    Mutant(
        "the alignment is not checked",
        OPERANDS,
        "if address & (source.itemsize - 1):",
        "if False:",
        "mpirun -n 2 tests.sim.scenarios misaligned_arrays",
    ),
    Mutant(
        "an out that is not contiguous is not written back",
        "ipcreduce/device_reducer.py",
        "copied = [used for used in members if used.destination is not used.target]",
        "copied: list[DeviceOperands] = []",
        STRIDED_OUT,
    ),
    Mutant(
        "an input that the result overlaps in part is not copied",
        OPERANDS,
        "return first != other and abs(first - other) < source.nbytes",
        "return False",
        SHIFTED_OUT,
    ),
    Mutant(
        "a read-only out is written",
        OPERANDS,
        "    if views.is_readonly(target):\n",
        "    if False:\n",
        WRONG_CALLS,
    ),
    Mutant(
        "an out whose elements share memory is taken",
        ARRAYS,
        "    return bool((np.diff(places) < itemsize).any())",
        "    return False",
        unit("arrays", "elements_that_share_memory"),
    ),
    Mutant(
        "an array on another GPU is taken",
        OPERANDS,
        "    if views.device_of(array) != ordinal:\n",
        "    if False:\n",
        "mpirun -n 2 tests.sim.scenarios arrays_of_another_device",
    ),
    Mutant(
        "an out of another shape is taken",
        OPERANDS,
        "if out.shape != array.shape or out.dtype != array.dtype:",
        "if out.dtype != array.dtype:",
        WRONG_CALLS,
    ),
    Mutant(
        "the producer's stream is not waited for",
        ARRAYS,
        "        streams.let_wait(stream, producer)\n",
        "        pass\n",
        tensors("by_interface"),
    ),
    Mutant(
        "DLPack's producer is not told the stream",
        ARRAYS,
        "            with on_stream(stream):\n                return cupy.from_dlpack(",
        "            if True:\n                return cupy.from_dlpack(",
        tensors("by_dlpack"),
    ),
    Mutant(
        "the offset of a DLPack tensor is ignored",
        PROTOCOLS,
        "return data + offset, shape,",
        "return data, shape,",
        unit("arrays", "dlpack_with_an_offset_and_no_strides"),
    ),
    Mutant(
        "a DLPack tensor of unsigned integers counts as signed",
        PROTOCOLS,
        '{0: "int", 1: "uint",',
        '{0: "int", 1: "int",',
        unit("arrays", "the_location_by_dlpack"),
    ),
    Mutant(
        "what has no memory is read on the device",
        ARRAYS,
        "    if not pointer(found) and found.size:\n",
        "    if False:\n",
        tensors("without_memory"),
    ),
    Mutant(
        "what has no memory is recorded as an input",
        ARRAYS,
        "    if place is not None and not place[0] and 0 not in place[1]:\n",
        "    if False:\n",
        tensors("without_memory"),
    ),
    Mutant(
        "the short way takes an array without memory",
        "ipcreduce/cuda/cupy_runtime.py",
        "if address and place.device_id == device else None",
        "if place.device_id == device else None",
        tensors("without_memory"),
    ),
    Mutant(
        "NumPy takes memory of its own for an array that has none",
        PROTOCOLS,
        "        if not data and all(",
        "        if False and all(",
        unit("arrays", "an_address_of_0_is_refused"),
    ),
    Mutant(
        "DLPack's flag of read-only memory is ignored",
        PROTOCOLS,
        "        return not flags & _NOT_TO_BE_WRITTEN\n",
        "        return True\n",
        unit("arrays", "what_says_that_it_may_be_written"),
    ),
    Mutant(
        "an array that DLPack does not call writable is written",
        PROTOCOLS,
        '    return any(base.__module__.partition(".")[0] in _MUTABLE for base in type(array).__mro__)\n',
        "    return True\n",
        tensors("not_to_be_written"),
    ),
    Mutant(
        "a host array that DLPack does not call writable is written",
        PROTOCOLS,
        "    elif mutable and not view.flags.writeable:\n",
        "    elif not view.flags.writeable:\n",
        unit("host_operands", "an_out_that_does_not_say_that_it_may_be_written"),
    ),
    # ---- tensors
    Mutant(
        "a tensor's memory is given back while another stream uses it",
        TORCH,
        "    tensor.record_stream(torch.cuda.ExternalStream(stream, device=tensor.device))\n",
        "",
        tensors("results_are_tensors"),
    ),
    Mutant(
        "a tensor is read before PyTorch's stream has written it",
        TORCH,
        "    if current != stream:\n        streams.let_wait",
        "    if False:\n        streams.let_wait",
        tensors("on_torchs_stream"),
    ),
    Mutant(
        "a tensor's call runs on CuPy's stream",
        OPERANDS,
        "if stream is None and not views.is_cupy(array) and torch_runtime.is_tensor(array):",
        "if False:",
        tensors("on_torchs_stream"),
    ),
    Mutant(
        "a tensor that requires grad is reduced without one",
        TENSORS,
        "    if tensor.requires_grad and torch_runtime.torch.is_grad_enabled():\n",
        "    if False:\n",
        tensors("memory_that_is_not_the_tensors_values"),
    ),
    Mutant(
        "the short way takes a tensor that PyTorch reads as negated",
        TORCH,
        "        or tensor.is_neg()\n        or tensor.is_conj()",
        "        or tensor.is_conj()",
        tensors("memory_that_is_not_the_tensors_values"),
    ),
    # ---- what people pass
    Mutant(
        "any and all are taken of numbers",
        KINDS,
        "if dtype is not None and dtype != np.dtype(bool):",
        "if False:",
        WRONG_CALLS,
    ),
    Mutant(
        "an array in the place of the op is printed",
        "ipcreduce/texts.py",
        "    return type(value).__qualname__\n",
        "    return repr(value)\n",
        unit("ops", "no_text_is_made_of_an_op"),
    ),
    Mutant(
        "PyTorch's op is known by its first name",
        KINDS,
        "if op == getattr(holder, name))",
        "if True)",
        unit("ops", "ops_of_pytorch"),
    ),
    Mutant(
        "a subclass of NumPy's arrays is indexed in its own way",
        "ipcreduce/arrays/host_operands.py",
        "        return np.asarray(array)\n    for number",
        "        return array\n    for number",
        "mpirun -n 2 tests/mpi/host_worker.py memory subclasses",
    ),
    Mutant(
        "a subclass of CuPy's arrays is indexed in its own way",
        ARRAYS,
        "found = cupy.ndarray.view(array, type=cupy.ndarray)",
        "found = array",
        "mpirun -n 2 tests.simulated tests/gpu/scenarios.py subclasses",
    ),
    Mutant(
        "the short way takes a part of a zero tensor, which has an address and no memory",
        TORCH,
        "        or is_zero(tensor)\n",
        "",
        tensors("without_memory"),
    ),
    Mutant(
        "a tensor that interprets PyTorch's operators itself is read",
        TENSORS,
        "    if not is_plain and torch_runtime.is_wrapper_type(type(tensor)):\n",
        "    if False:\n",
        tensors("without_memory"),
    ),
    Mutant(
        "the address check asks a tensor that interprets operators itself for its address",
        ARRAYS,
        "    if torch_runtime.is_wrapper_type(kind):\n",
        "    if False:\n",
        tensors("without_memory"),
    ),
    Mutant(
        "a call within torch.jit.trace is made",
        TENSORS,
        "    if torch_runtime.is_tracing():\n",
        "    if False:\n",
        tensors("where_a_result_would_be_lost"),
    ),
    Mutant(
        "the short way is taken in a trace",
        TORCH,
        "        or is_tracing()\n",
        "",
        tensors("where_a_result_would_be_lost"),
    ),
    Mutant(
        "a call that is known is made in a trace",
        TORCH_LISTS,
        "if is_tracing() or ",
        "if ",
        tensors("where_a_result_would_be_lost"),
    ),
    Mutant(
        "a call that is known is made within make_fx",
        TORCH_LISTS,
        "modes._is_in_torch_dispatch_mode or duals",
        "duals",
        tensors("where_a_result_would_be_lost"),
    ),
    Mutant(
        "a forward-mode derivative is lost",
        TENSORS,
        "    if duals.unpack_dual(tensor).tangent is None:\n",
        "    if True:\n",
        tensors("where_a_result_would_be_lost"),
    ),
    # ---- host arrays
    Mutant(
        "small messages have one part instead of two in turns",
        SHARED,
        "self._part = 1 - self._part",
        "self._part = 0",
        unit("segment", "small_messages_in_a_row"),
    ),
    Mutant(
        "a chunk's results are copied before all ranks have made them",
        SHARED,
        "op, results[rank])\n        self._segment.hand_over(check)\n",
        "op, results[rank])\n",
        unit("segment", "chunks_of_changing_length_and_dtype"),
    ),
    Mutant(
        "data that overlap their result are not copied on the host",
        SHARED,
        "if array is not out and np.may_share_memory(source, target):",
        "if False:",
        unit("segment", "data_that_overlap_their_results"),
    ),
    Mutant(
        "handovers of calls that failed are left to the next one",
        SHARED,
        "        self._segment.drain()\n",
        "",
        unit("segment", "the_missing_are_named_and_a_reset_forgets_what_they_gave"),
    ),
    Mutant(
        "half types are rounded after each addition on the host",
        NUMERICS,
        "_accumulate([value.astype(np.float32) for value in values], op, np.empty(out.shape, np.float32))",
        "_accumulate(values, op, out)",
        unit("dtypes", "half_types_round_once"),
    ),
]
