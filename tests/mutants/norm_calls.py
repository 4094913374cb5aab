"""Mutants of calls with RMSNorm above the kernels: NumPy's bits, arguments, copies, comparison, known calls."""

from __future__ import annotations

from tests.mutants import Mutant, unit

HOST, ARGUMENTS, DEVICE = "ipcreduce/host/rmsnorm.py", "ipcreduce/arrays/norms.py", "ipcreduce/arrays/device_norms.py"
CALLS, KNOWN, REDUCER = "ipcreduce/device/norms.py", "ipcreduce/device/known_norms.py", "ipcreduce/device_reducer.py"
CUPY = "ipcreduce/cuda/cupy_runtime.py"
BITS, QUANTISED = unit("rmsnorm", "bits_of_rows"), unit("rmsnorm", "bits_of_e4m3")
SHARED, COMPARED = unit("rmsnorm", "outputs_that_share_memory"), unit("rmsnorm", "what_the_ranks_compare")


def scenario(name: str) -> str:
    """The command of a scenario of norms."""
    return f"mpirun -n 2 tests.sim.scenarios {name}"


MUTANTS = [
    # ---- on the host
    Mutant(
        "the sums of a tree are those of its halves",
        HOST,
        "values[:, 0::2] + values[:, 1::2]",
        "values[:, : values.shape[1] // 2] + values[:, values.shape[1] // 2 :]",
        BITS,
    ),
    Mutant(
        "fma rounds twice",
        HOST,
        "odd = np.where((error > 0) & even,",
        "odd = np.where((error > 0) & ~even & even,",
        unit("rmsnorm", "fused_multiply_add_near_the_middle_of_two_numbers"),
    ),
    Mutant(
        "y is quantised before it is rounded",
        HOST,
        "values = y.astype(np.float32)",
        "values = (x * added) * factors[:, None]",
        QUANTISED,
    ),
    Mutant(
        "what is too large for e4m3 becomes NaN",
        HOST,
        "np.clip(scaled, -_LARGEST, _LARGEST).astype",
        "scaled.astype",
        QUANTISED,
    ),
    Mutant(
        "the residual sum is not rounded before the norm",
        HOST,
        "    return out.astype(np.float32)",
        "    return values",
        BITS,
    ),
    # ---- arguments
    Mutant(
        "an output may share memory with any argument",
        ARGUMENTS,
        "if _IN_PLACE.get(output) != name:",
        "if False:",
        SHARED,
    ),
    Mutant(
        "an output may share a part of the memory of its input",
        ARGUMENTS,
        "if not _same_elements(written, array):",
        "if False:",
        SHARED,
    ),
    Mutant(
        "a read-only output is written",
        ARGUMENTS,
        "check_writable(argument if on_gpu else arrays[name], argument, name)",
        "pass",
        SHARED,
    ),
    Mutant(
        "columns of scales begin anywhere",
        "ipcreduce/calls/norm_shape.py",
        "return -(-self.rows // 4) * 4",
        "return self.rows",
        unit("rmsnorm", "column_major_scales"),
    ),
    # ---- what the ranks compare
    Mutant(
        "calls are compared without eps",
        "ipcreduce/calls/fingerprint.py",
        ", eps {np.float32(shape.eps)!s}",
        "",
        COMPARED,
    ),
    Mutant(
        "calls are compared without their residual",
        "ipcreduce/calls/fingerprint.py",
        'text += ", residual"',
        'text += ""',
        COMPARED,
    ),
    # ---- on the GPU
    Mutant(
        "misaligned arrays are not copied",
        DEVICE,
        "(not views.is_contiguous(array) or views.pointer(array) % alignment)",
        "not views.is_contiguous(array)",
        scenario("laid_out_norms"),
    ),
    Mutant(
        "strided outputs are not written",
        REDUCER,
        "self._end(place, used.outputs, *arrays)",
        "self._end(place, [], *arrays)",
        scenario("laid_out_norms"),
    ),
    Mutant(
        "the sum of a pair overwrites the residual",
        CALLS,
        "return self.plain is not None and not self.shape.keeps_y and in_place",
        "return False",
        scenario("in_place_norms"),
    ),
    Mutant(
        "a recording does not hold the arrays of a call",
        REDUCER,
        "self._session.note_list(prepared, *used.held)",
        "self._session.note_list(prepared)",
        scenario("recorded_norms"),
    ),
    # ---- known calls
    Mutant(
        "a known call has the shapes of the first one",
        KNOWN,
        "if array.ndim != axes or len(array) != length or (shape is not None and array.shape != shape):",
        "if False:",
        scenario("known_norms_of_another_shape"),
    ),
    Mutant(
        "of the shape of a known call only axes and length count",
        CUPY,
        "array.shape if array.ndim > 2 or array.size == 0 else None",
        "None",
        scenario("known_norms_of_another_shape"),
    ),
    Mutant(
        "a known call on CuPy's arrays is on PyTorch's stream",
        KNOWN,
        "            current = cupy_runtime.get_current_stream().ptr\n",
        "            current = (torch_runtime if torch_runtime.works() else cupy_runtime).stream_handle(0)\n",
        scenario("known_norms"),
    ),
    Mutant(
        "a known call on tensors is on CuPy's stream",
        KNOWN,
        "current: Stream = library.stream_handle(self._device)",
        "current: Stream = cupy_runtime.stream_handle(self._device)",
        scenario("new_tensors_of_norms"),
    ),
    Mutant(
        "a call is known by its arrays, whatever eps is",
        KNOWN,
        "if known is None or not (eps is known.eps or (type(eps) is float and eps == known.eps)):",
        "if known is None:",
        scenario("known_norms_of_another_shape"),
    ),
    Mutant(
        "a known call in place takes outputs of e4m3 without quantize",
        KNOWN,
        "in_place = how is None and out is x and residual_out is residual and quant_out is scales_out is None",
        "in_place = how is None and out is x and residual_out is residual",
        scenario("known_norms"),
    ),
    Mutant(
        "a call is known by its arrays, whatever the weight's bias is",
        KNOWN,
        "if not (bias is known.bias or (type(bias) is float and bias == known.bias)):",
        "if False:",
        scenario("known_norms_of_another_shape"),
    ),
    Mutant(
        "a call is known by the places of its arrays alone",
        KNOWN,
        "found: list[Any] = [given[2], given[6]]",
        "found: list[Any] = []",
        scenario("known_norms_of_another_shape"),
    ),
    Mutant(
        "a known call is not forgotten with its arrays",
        KNOWN,
        "        norms.forget(key)\n",
        "        pass\n",
        scenario("known_norms"),
    ),
    Mutant(
        "a known call with new results is on whatever stream is current",
        KNOWN,
        "return current if stream is None else given_stream(stream, current, True)",
        "return current",
        scenario("new_results_on_streams"),
    ),
    Mutant(
        "a known call with new results writes over its arguments",
        KNOWN,
        "(kind.written and not kind.is_apart(addresses))",
        "False",
        scenario("known_kinds_of_norms"),
    ),
    Mutant(
        "a known call with new results takes misaligned arrays",
        KNOWN,
        "if not kind.fits(addresses):",
        "if False:",
        scenario("known_kinds_of_norms"),
    ),
    Mutant(
        "a kind of calls has no shapes",
        KNOWN,
        "address, shape, dtype = place\n                key += shape, dtype",
        "address, shape, dtype = place\n                key += (dtype,)",
        scenario("known_kinds_of_norms"),
    ),
    Mutant(
        "new results are made in a capture",
        KNOWN,
        "if current > 1 and self._order.quick(current) is None:",
        "if False:",
        unit("known_norms", "a_capture"),
    ),
    Mutant(
        "a norm is looked up before its call begins",
        "ipcreduce/communicator.py",
        "        if fast is None:\n            return turns.make(parts.calls, self._allreduce_rmsnorm",
        "        if fast is None or fast.known.find(given, None, given, stream) is None:\n"
        "            return turns.make(parts.calls, self._allreduce_rmsnorm",
        scenario("interrupted_look_ups"),
    ),
    Mutant(
        "a call is known by its quantisation, whatever the scale is",
        KNOWN,
        "id(scales_out), id(how._scale),",
        "id(scales_out), 0,",
        scenario("copied_descriptions"),
    ),
    Mutant(
        "a norm takes more rows than its kernel counts",
        "ipcreduce/device/norm_kernels.py",
        "if shape.rows > _MOST_ROWS or shape.hidden > longest:",
        "if shape.hidden > longest:",
        unit("norm_kernels", "more_than_kernels_count_is_refused"),
    ),
    Mutant(
        "a norm takes longer rows than its kernel counts",
        "ipcreduce/device/norm_kernels.py",
        "if shape.rows > _MOST_ROWS or shape.hidden > longest:",
        "if shape.rows > _MOST_ROWS:",
        unit("norm_kernels", "more_than_kernels_count_is_refused"),
    ),
    Mutant(
        "new results in other memory are written to the first ones",
        KNOWN,
        "place = kind, NormAddresses(*addresses)",
        "place = next(iter(self._of_kinds), (kind, NormAddresses(*addresses)))",
        scenario("new_results_of_norms"),
    ),
]
