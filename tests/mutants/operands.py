"""Mutants of what becomes of a call's arrays, and of host arrays' reduction."""

from __future__ import annotations

from tests.mutants import Mutant, unit

ARRAYS, OPERANDS, PROTOCOLS = "ipcreduce/arrays.py", "ipcreduce/operands.py", "ipcreduce/cuda/array_protocols.py"
TORCH, SHARED, NUMERICS = "ipcreduce/cuda/torch_runtime.py", "ipcreduce/host/shared.py", "ipcreduce/numerics.py"
SWEEP = "mpirun -n 2 tests.simulated tests/gpu/sweep.py --cases 1 --largest"  # its first case is
STRIDED_OUT, SHIFTED_OUT = f"{SWEEP} 300 --seed 1680", f"{SWEEP} 2000000 --smallest 1500000 --seed 127"
WRONG_CALLS = "mpirun -n 2 tests.simulated tests/gpu/bad_calls.py"


def tensors(scenario: str) -> str:
    """The command of a scenario of PyTorch's tensors."""
    return f"mpirun -n 2 tests.sim.scenarios {scenario}"


MUTANTS = [
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
        "if (source_address | destination_address) & (source.itemsize - 1):",
        "if False:",
        "mpirun -n 2 tests.sim.scenarios misaligned_arrays",
    ),
    Mutant(
        "an out that is not contiguous is not written back",
        OPERANDS,
        "return self.destination is not self.target",
        "return False",
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
        "    if arrays.is_readonly(out):\n",
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
        "    if arrays.device_of(array) != ordinal:\n",
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
        "        streams.wait_event(stream, event)\n",
        "",
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
        "    if current != stream:\n        _let_wait",
        "    if False:\n        _let_wait",
        tensors("on_torchs_stream"),
    ),
    Mutant(
        "a tensor's call runs on CuPy's stream",
        OPERANDS,
        "if stream is None and not arrays.is_cupy(array) and torch_runtime.is_tensor(array):",
        "if False:",
        tensors("on_torchs_stream"),
    ),
    Mutant(
        "a tensor that requires grad is reduced without one",
        TORCH,
        "    return bool(tensor.requires_grad and torch.is_grad_enabled())\n\n\n# ----",
        "    return False\n\n\n# ----",
        tensors("memory_that_is_not_the_tensors_values"),
    ),
    Mutant(
        "the short way takes a tensor that PyTorch reads as negated",
        TORCH,
        "        or tensor.is_neg()\n        or tensor.is_conj()",
        "        or tensor.is_conj()",
        tensors("memory_that_is_not_the_tensors_values"),
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
        unit("numerics", "half_types_round_once"),
    ),
]
