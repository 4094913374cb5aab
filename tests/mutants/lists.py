"""Mutants of lists of arrays in one call: plan, table, kernels, operands, comparison, recordings, NCCL's groups."""

from __future__ import annotations

from tests.mutants import Mutant, unit

PLAN, KERNELS, OPERANDS = "ipcreduce/ipc/lists.py", "kernels/list.cuh", "ipcreduce/arrays/lists.py"
KNOWN, CUPY = "ipcreduce/device/known_lists.py", "ipcreduce/cuda/cupy_runtime.py"
OTHERS, SHAPES, OF_ANY_SIZE, READ = (
    unit("known_arrays", name)
    for name in (
        "other_arrays_are_not_those_of_a_known_list", "any_change_of_shapes_is_seen",
        "other_shapes_of_any_size_are_seen", "what_a_reader_of_arrays_takes",
    )
)  # fmt: skip
IN_TURNS = unit("known_arrays", "lists_in_turns_at_places_of_their_own")
REDUCER, NCCL = "ipcreduce/device_reducer.py", "ipcreduce/nccl/comm.py"
EVERY_BYTE, TABLE = unit("lists", "every_byte_is_in_one_part"), unit("lists", "the_table_has_the_parts_and_no_others")
FINDS, ADDRESSES = unit("kernel_layout", "a_thread_finds_its_array"), unit("lists", "addresses_of_parts")


def scenario(name: str, ranks: int = 2) -> str:
    """The command of a scenario of lists."""
    return f"mpirun -n {ranks} tests.sim.scenarios {name}"


MUTANTS = [
    # ---- kernels
    Mutant(
        "a packet belongs to the array that begins behind it",
        KERNELS,
        "parts.first[part + step] <= index",
        "parts.first[part + step] <= index + 1",
        FINDS,
    ),
    Mutant(
        "the last place of a list's table is not looked at",
        KERNELS,
        "if (part + step < kParts && ",
        "if (part + step < kParts - 1 && ",
        FINDS,
    ),
    Mutant(
        "an array of a list is read from its first packet on, whatever packet is meant",
        KERNELS,
        "message_at<kAligned>(base - bytes_before,",
        "message_at<kAligned>(base,",
        FINDS,
    ),
    Mutant(
        "an array of a list ends with its launch",
        KERNELS,
        "bytes_before + list.parts.bytes[part]);",
        "bytes_before + 16 * list.parts.bytes[part]);",
        FINDS,
    ),
    Mutant(
        "the inputs of a list are its outputs",
        KERNELS,
        "list.in ? list.parts.in[part] : list.parts.out[part]",
        "list.parts.out[part]",
        scenario("forms_of_lists"),
    ),
    # ---- plan
    Mutant(
        "what earlier launches took of an array is taken again",
        PLAN,
        "chunk[low:high], skipped.astype(np.uint64), first",
        "chunk[low:high], (0 * skipped).astype(np.uint64), first",
        EVERY_BYTE,
    ),
    Mutant(
        "a part has more bytes than its launch has room for",
        PLAN,
        "left = np.minimum(nbytes[low:high] - skipped, (end - begin - first) * PACKET_BYTES)",
        "left = nbytes[low:high] - skipped",
        EVERY_BYTE,
    ),
    Mutant(
        "arrays of a list share packets",
        PLAN,
        "packets = -(-nbytes // PACKET_BYTES)",
        "packets = nbytes // PACKET_BYTES + (nbytes < PACKET_BYTES)",
        EVERY_BYTE,
    ),
    Mutant("places without a part count as the first one", PLAN, "= _NO_PART\n    numbers", "= 0\n    numbers", TABLE),
    Mutant(
        "odd bytes in a list count as whole packets",
        PLAN,
        "bits | self._odd",
        "bits",
        ADDRESSES,
    ),
    Mutant(
        "a part has the address of its array",
        PLAN,
        "[self.plan.members] + self.plan.offsets",
        "[self.plan.members]",
        ADDRESSES,
    ),
    Mutant(
        "a list of two dtypes is reduced as one",
        "ipcreduce/ipc/launches.py",
        "array.nbytes if of == (kind, name) else 0",
        "array.nbytes",
        scenario("forms_of_lists"),
    ),
    # ---- what the ranks compare
    Mutant(
        "lists are compared without their shapes",
        "ipcreduce/calls/fingerprint.py",
        'f"{dtype} {shape}" for shape, dtype in members',
        "dtype for shape, dtype in members",
        unit("lists", "what_the_ranks_compare"),
    ),
    # ---- operands
    Mutant(
        "outputs of a list are not compared with one another",
        OPERANDS,
        "if other == index or not (written or other_written):",
        "if other == index or written == other_written:",
        unit("lists", "outputs_that_share_memory"),
    ),
    Mutant(
        "outputs of a list are compared with the next array alone",
        OPERANDS,
        "        open_ones.append(((first, past), index, written))\n",
        "        open_ones = [((first, past), index, written)]\n",
        unit("lists", "outputs_that_share_memory"),
    ),
    Mutant(
        "the outputs of a list on the GPU may share memory",
        OPERANDS,
        "        if out is not None:\n            check_apart([(used.given, used.target)",
        "        if False:\n            check_apart([(used.given, used.target)",
        "mpirun -n 2 tests.simulated tests/gpu/bad_calls.py",
    ),
    Mutant(
        "an output that is None is left out",
        OPERANDS,
        "        if output is None:\n",
        "        if False:\n",
        unit("lists", "outputs_of_a_list"),
    ),
    Mutant(
        "tensors and other arrays are reduced on the first one's stream",
        OPERANDS,
        "if of_torch != cupy_runtime.stream_of()[0]:",
        "if False:",
        scenario("lists_of_tensors"),
    ),
    # ---- lists that are known
    Mutant(
        "a list is known by its first and its last array",
        KNOWN,
        "if [*map(id, arrays)] != ids or ",
        "if ",
        OTHERS,
    ),
    Mutant(
        "a list is known by its first output",
        KNOWN,
        "[*map(id, out)] == others and ",
        "",
        OTHERS,
    ),
    Mutant(
        "a list is known although its shapes are others",
        KNOWN,
        " or not self._have_shapes(arrays):",
        ":",
        unit("known_arrays", "the_shape_of_a_known_array_changes"),
    ),
    Mutant(
        "a list is known although its outputs have other shapes",
        KNOWN,
        " and self._have_shapes(out))",
        ")",
        unit("known_arrays", "the_shape_of_a_known_array_changes"),
    ),
    Mutant(
        "a list is known after its arrays have died",
        KNOWN,
        "        self._by_ends.pop(ends, None)\n",
        "        return\n",
        unit("known_arrays", "a_known_array_dies"),
    ),
    Mutant(
        "a known list that has died meanwhile cannot be forgotten",
        KNOWN,
        "            self.forget(ends)\n",
        "            del self._by_ends[ends]\n",
        unit("known_arrays", "a_known_array_dies_within_a_call"),
    ),
    Mutant(
        "a list is launched for each array",
        "ipcreduce/ipc/launches.py",
        "for kind, name in dict.fromkeys(names):",
        "for kind, name in names:",
        scenario("forms_of_lists"),
    ),
    Mutant(
        "lists of arrays that come once are known by these",
        KNOWN,
        "if first is None or first() is not arrays[0]:",
        "if False:",
        unit("known_arrays", "new_arrays_at_the_addresses_of_others"),
    ),
    Mutant(
        "known tensors are where they were",
        KNOWN,
        "return read(tensors) == self._sources and (",
        "return (",
        unit("known_arrays", "tensors_whose_memory_changes"),
    ),
    Mutant(
        "known tensors for results are where they were",
        KNOWN,
        "read(out) == self._targets)",
        "True)",
        unit("known_arrays", "tensors_whose_memory_changes"),
    ),
    Mutant(
        "a known array of two axes has the shape that it had",
        CUPY,
        "[_ndim, len, _size] if of_any_size else [_ndim, len]",
        "[_ndim, len, _size] if of_any_size else [_ndim]",
        SHAPES,
    ),
    Mutant(
        "the shape of an array without elements is known by its length",
        CUPY,
        " and not any(0 in shape for shape in shapes)",
        "",
        SHAPES,
    ),
    Mutant(
        "the length of an array without axes is asked for",
        CUPY,
        "return False\n        return True",
        "pass\n        return False not in [[*map(tell, others)] == known for tell, known in expected]",
        SHAPES,
    ),
    Mutant(
        "new arrays of one axis have as many elements as those before",
        CUPY,
        "[_ndim, len] if of_any_size else [_ndim]",
        "[_ndim]",
        OF_ANY_SIZE,
    ),
    Mutant(
        "new arrays of two axes have as many elements as those before",
        CUPY,
        "[_ndim, len, _size] if of_any_size else [_ndim, len]",
        "[_ndim, len]",
        OF_ANY_SIZE,
    ),
    Mutant(
        "new arrays of a list have any shape",
        CUPY,
        "return addresses if have_shapes(others) else None",
        "return addresses",
        READ,
    ),
    Mutant(
        "new arrays of a list have any dtype",
        CUPY,
        " or [array.dtype for array in others] != dtypes",
        "",
        READ,
    ),
    Mutant(
        "new arrays of a list may lie on another GPU",
        CUPY,
        "            if place.device_id == device\n        ]",
        "            if True\n        ]",
        READ,
    ),
    Mutant(
        "new arrays of a list may have strides",
        CUPY,
        " and array._c_contiguous\n",
        "",
        READ,
    ),
    Mutant(
        "a list is launched where the one before it was",
        KNOWN,
        "        ready.argument = places\n",
        "        ready.argument = ready.argument or places\n",
        IN_TURNS,
    ),
    Mutant(
        "new arrays of a list may be more than those before",
        CUPY,
        "        if len(others) != length:\n            return None\n",
        "",
        READ,
    ),
    Mutant(
        "a list that comes again is launched where the one before it was",
        "ipcreduce/ipc/ready.py",
        "                launch.set(there)\n",
        "",
        scenario("known_lists_in_turns"),
    ),
    Mutant(
        "members without bytes count as parts",
        PLAN,
        "if len(self.launches) == 1 and self.launches[0].every:",
        "if len(self.launches) == 1:",
        unit("lists", "a_list_is_launched_by_its_parts"),
    ),
    Mutant(
        "tuples of arrays are not known",
        "ipcreduce/device/known_calls.py",
        "(type(array) is list or type(array) is tuple)",
        "type(array) is list",
        unit("known_arrays", "lists_and_tuples_are_found_as_lists"),
    ),
    Mutant(
        "of a list that comes again only the first launch is made",
        "ipcreduce/ipc/ready.py",
        "for launch, there in parts:",
        "for launch, there in parts[:1]:",
        scenario("known_lists_of_several_launches"),
    ),
    Mutant(
        "a list that comes again has members for parts",
        "ipcreduce/ipc/ready.py",
        "[(launch, launch.parts(places)) for",
        "[(launch, places) for",
        scenario("known_lists_of_several_launches"),
    ),
    Mutant(
        "a list that comes again is made anew",
        KNOWN,
        "out is None, ready is None)",
        "out is None, False)",
        IN_TURNS,
    ),
    Mutant(
        "lists without bytes are made ready",
        KNOWN,
        "if not any(sizes):",
        "if False:",
        unit("known_arrays", "lists_without_bytes_go_the_usual_way"),
    ),
    Mutant(
        "outputs of a known list may share memory",
        KNOWN,
        "not (new or kind.are_apart(",
        "not (True or kind.are_apart(",
        scenario("known_lists_of_other_arrays"),
    ),
    Mutant(
        "outputs of a long list are compared with each other alone",
        KNOWN,
        "        if targets is not sources:\n            read",
        "        if False:\n            read",
        unit("known_lists", "lists_side_by_side_are_apart"),
    ),
    Mutant(
        "lists of one length have one kind",
        KNOWN,
        "None if length in self._of_length else kind",
        "kind",
        unit("known_arrays", "lists_of_one_length"),
    ),
    Mutant(
        "an array of a list has address 0",
        KNOWN,
        "if np.count_nonzero(every) == len(every) else 0",
        "",
        unit("known_lists", "addresses_that_fit"),
    ),
    # ---- recordings, ends, NCCL
    Mutant(
        "a recording does not hold the members of a list",
        REDUCER,
        "self._session.note_list(prepared, *arrays_used)",
        "self._session.note_list(prepared)",
        scenario("recorded_lists"),
    ),
    Mutant(
        "a synchronous list is not waited for",
        REDUCER,
        "elif self._sync and not backend.is_capturing(stream):",
        "elif False:",
        scenario("synchronous_lists"),
    ),
    Mutant(
        "a group of NCCL is not ended",
        NCCL,
        "            library.end_group()\n        except Exception",
        "        except Exception",
        "mpirun -n 2 tests.matrix nccl --sim --kind=list '--way=captured by others'",
    ),
    Mutant(
        "the default communicator is made on another GPU than a list's arrays",
        "ipcreduce/default.py",
        "array[0] if isinstance(array, (list, tuple)) and array else array",
        "array",
        scenario("first_list_of_the_default_communicator"),
    ),
]
