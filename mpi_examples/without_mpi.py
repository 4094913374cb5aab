# python mpi_examples/without_mpi.py
"""Sum an array over processes that Python's multiprocessing has started: a group of a dozen lines in place of MPI."""

from __future__ import annotations

import multiprocessing
import sys

import ipcreduce


class Group:
    """What ipcreduce.Communicator takes: rank, size, and allgather, of which only its start-up makes use."""

    def __init__(self, rank, rows, barrier):
        self.rank, self.size, self.rows, self.barrier = rank, len(rows), rows, barrier

    def allgather(self, data):
        self.rows[self.rank] = data
        self.barrier.wait()  # all have come
        found = list(self.rows)
        self.barrier.wait()  # all have read
        return found


def main(rank, rows, barrier):
    comm = ipcreduce.Communicator(Group(rank, rows, barrier), device="auto")  # takes a GPU for each, if there are any
    xp = comm.xp
    if comm.backend == "host" and comm.rank == 0:
        print(
            "no GPUs here: with GPUs the same lines reduce CuPy arrays, which never pass through the host", flush=True
        )
    mine = xp.full(1000, comm.rank + 1, dtype=xp.float32)
    total = comm.allreduce(mine)
    right = bool((total == sum(range(1, comm.size + 1))).all())
    print(f"rank {comm.rank} of {comm.size}, backend {comm.backend}: brought {mine[0]}, got {total[0]}", flush=True)
    comm.close()
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    context = multiprocessing.get_context("spawn")  # CUDA does not work in a forked process
    with context.Manager() as manager:
        given = manager.list([b""] * size), context.Barrier(size)
        processes = [context.Process(target=main, args=(rank, *given)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    sys.exit(any(process.exitcode for process in processes))
