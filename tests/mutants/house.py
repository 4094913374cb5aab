"""Mutants of the house in which the ranks meet: launchers, connections, files in /dev/shm, the kernel cache."""

from __future__ import annotations

from tests.mutants import Mutant, unit

GROUPS, LAUNCHERS, HANDSHAKE, CONNECTIONS = (
    f"ipcreduce/ranks/{name}.py" for name in ("groups", "launchers", "handshake", "connections")
)
COMPILER, FILES, SEGMENT, STARTUP = (
    "ipcreduce/cuda/compiler.py",
    "ipcreduce/page/shared_files.py",
    "ipcreduce/host/segment.py",
    "ipcreduce/startup.py",
)

MACHINE, PROCESSES, PROGRESS = (f"tests/tools/{name}.py" for name in ("machine", "processes", "progress"))

MUTANTS = [
    # ---- other people's machines
    Mutant(
        "a folder of PATH that is closed ends make",
        MACHINE,
        'if not os.path.exists(Path(one, "..", "pyvenv.cfg"))',
        'if not Path(one, "..", "pyvenv.cfg").exists()',
        unit("make", "an_mpirun_in_any_folder"),
    ),
    Mutant(
        "a folder's space is taken for one between words",
        MACHINE,
        "[found] if os.path.exists(found) else shlex.split(found)",
        "shlex.split(found)",
        unit("make", "an_mpirun_in_any_folder"),
    ),
    Mutant(
        "tests keep files in another user's directory",
        MACHINE,
        " and status.st_uid == os.getuid() and not status.st_mode & 0o077",
        "",
        unit("make", "a_directory_of_this_user_alone"),
    ),
    Mutant(
        "what MPI's killed ranks leave in /dev/shm stays",
        PROCESSES,
        "                file.unlink()\n",
        "                pass\n",
        unit("processes", "what_a_killed_rank_of_mpi_leaves_is_removed"),
    ),
    Mutant(
        "the file of a rank that lives is taken for left over",
        PROCESSES,
        "        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n",
        "",
        unit("processes", "what_a_killed_rank_of_mpi_leaves_is_removed"),
    ),
    Mutant(
        "who opens a file ends the process that looks if it is left over",
        PROCESSES,
        "        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)",
        "        pass",
        unit("processes", "who_opens_a_file_that_is_looked_at_ends_nobody"),
    ),
    Mutant(
        "a run may leave files in /dev/shm",
        PROGRESS,
        "    return {*processes.left(), *processes",
        "    return {*processes",
        unit("make", "a_run_ends_with_the_shared_memory_that_it_found"),
    ),
    # ---- launchers
    Mutant(
        "a rank of a launcher is a world of one where there is no MPI",
        LAUNCHERS,
        "    if Launch.seen().name or any(name in os.environ for name in _OTHERS):\n        return False\n",
        "",
        unit("imports", "ranks_without_mpi_are_told_so"),
    ),
    Mutant(
        "a process of a PyTorch group is a world of one where there is no MPI",
        GROUPS,
        "launchers.seems_alone() and not _torch_has_ranks()",
        "launchers.seems_alone()",
        unit("imports", "ranks_without_mpi_are_told_so"),
    ),
    Mutant(
        "a launcher of another MPI is not noticed",
        GROUPS,
        "            launchers.check(group)\n",
        "            pass\n",
        unit("launchers", "ranks_that_mpi_does_not_see_are_refused"),
    ),
    Mutant(
        "a group of one is refused under a launcher",
        GROUPS,
        "        if group == module.COMM_WORLD:",
        "        if True:",
        unit("launchers", "a_group_of_one_is_meant_to_be_one"),
    ),
    Mutant(
        "a launcher of one rank is taken for one of another MPI",
        LAUNCHERS,
        "        if size != 1 or self.size == 1:",
        "        if size != 1 or not self.name:",
        unit("launchers", "a_launcher_of_one_rank_is_right"),
    ),
    Mutant(
        "a batch script of Slurm is taken for a rank",
        LAUNCHERS,
        "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS",
        unit("launchers", "a_batch_script_is_no_rank"),
    ),
    # ---- kernel cache
    Mutant(
        "a damaged kernel is given to the driver",
        COMPILER,
        "        if entry[: _SEAL.size] != _sealing(kernel):",
        "        if False:",
        unit("compiler", "a_damaged_entry_is_compiled_anew_and_replaced"),
    ),
    Mutant(
        "a full disk ends a call",
        COMPILER,
        '        except OSError as error:\n            self._say("written", error)',
        '        except KeyError as error:\n            self._say("written", error)',
        unit("compiler", "a_cache_in_which_nothing_can_be_written"),
    ),
    Mutant(
        "a cache of no use ends a call where warnings are errors",
        COMPILER,
        "        except RuntimeWarning:",
        "        except KeyError:",
        unit("compiler", "a_file_in_its_place"),
    ),
    Mutant(
        "chmod 700 is advised for /tmp",
        COMPILER,
        " or status.st_mode & (stat.S_ISVTX | stat.S_ISGID)",
        "",
        unit("compiler", "a_directory_that_others_share_on_purpose_stays_as_it_is"),
    ),
    # ---- connections between hosts
    Mutant(
        "whoever answers at a rank's address is taken for it",
        HANDSHAKE,
        "return None if answer is None else hmac.compare_digest(answer, self._due)",
        "return None if answer is None else True",
        unit("mirror", "whoever_listens_at_an_address_of_a_rank_is_not_taken_for_it"),
    ),
    Mutant(
        "a visitor's proof sent back is a host's",
        HANDSHAKE,
        '_LISTENS, _CONNECTS = b"listens", b"connects"',
        '_LISTENS, _CONNECTS = b"one", b"one"',
        unit("handshake", "a_proof_is_of_one_side"),
    ),
    Mutant(
        "a visitor's claim serves others",
        HANDSHAKE,
        'secrets.token_bytes(_CHALLENGE_BYTES), b""',
        'bytes(_CHALLENGE_BYTES), b""',
        unit("handshake", "a_claim_serves_once"),
    ),
    Mutant(
        "a rank that was sent away for want of room does not come again",
        CONNECTIONS,
        "            self._close(visit)\n            self._again.append(",
        '            self._fail(visit, "")\n            self._again.append(',
        unit("mirror", "ranks_take_turns_where_there_are_too_many"),
    ),
    Mutant(
        "addresses are tried that lead back to the host that tries them",
        CONNECTIONS,
        "[address for address in found if address not in mine] or found",
        "found",
        unit("mirror", "addresses_of_both_hosts_are_left_out"),
    ),
    # ---- files in /dev/shm
    Mutant(
        "what killed ranks leave stays",
        FILES,
        "            _remove_if_left(path)\n",
        "            pass\n",
        unit("shared_files", "what_a_killed_rank_leaves_goes_with_the_next_file"),
    ),
    Mutant(
        "files of ranks that start are taken for left over",
        FILES,
        "            if not _lock(descriptor, path):",
        "            if False:",
        unit("shared_files", "what_a_killed_rank_leaves_goes_with_the_next_file"),
    ),
    Mutant(
        "a file that has just been removed is handed out",
        FILES,
        "        return os.path.samestat(os.fstat(descriptor), os.lstat(path))",
        "        return True",
        unit("shared_files", "a_file_that_was_taken_for_left_over_is_made_again"),
    ),
    Mutant(
        "the file of a rank that is killed stays with those who survive",
        STARTUP,
        "        shared_files.remove(path)  #",
        "        rank or shared_files.remove(path)  #",
        "pytest tests/mpi/test_without_mpi.py::test_scenario[rank_0_is_killed_while_the_page_is_opened-3]",
    ),
    Mutant(
        "segments do not shrink where room is little",
        SEGMENT,
        "    return next(fitting, areas(n)[-1])",
        "    return areas(n)[0]",
        unit("segment", "how_many_find_room_in_a_container_of_docker"),
    ),
    Mutant(
        "only rank 0 warns of a full /dev/shm",
        STARTUP,
        "        if shared_files.NO_ROOM in str(error):",
        "        if shared_files.NO_ROOM in str(error) and not ranks.rank:",
        "pytest tests/mpi/test_lifecycle.py::test_lifecycle[3-no_room]",
    ),
]
