"""Mutants of suspend() and resume()."""

from __future__ import annotations

from tests.mutants import Mutant, unit
from tests.mutants.devices import scenario

SUSPENSION, VIRTUAL, BACKEND = "ipcreduce/suspension.py", "ipcreduce/ipc/virtual.py", "ipcreduce/device/backend.py"

MUTANTS = [
    Mutant(
        "a small result in the capture of another library takes a piece of virtual memory",
        "ipcreduce/graphs/pool.py",
        "if not virtual or nbytes < UNIT:",
        "if not virtual:",
        scenario("pools_given_back"),
    ),
    Mutant(
        "new memory is made for slabs that have kept theirs",
        "ipcreduce/graphs/pool.py",
        "                if slab.place is not None:\n                    self._prepared",
        "                if True:\n                    self._prepared",
        scenario("pools_given_back"),
    ),
    Mutant(
        "a kernel of others works on while there is no workspace",
        VIRTUAL,
        "driver.fill(self._own.address, EMPTY, EPOCHS_BYTES)",
        "driver.fill(self._own.address, 0, EPOCHS_BYTES)",
        scenario("graphs_of_others"),
    ),
    Mutant(
        "a launch while suspended is told to nobody",
        VIRTUAL,
        "        return bool(epoch[0] != _STOPPED)\n",
        "        return False\n",
        scenario("graphs_of_others"),
    ),
    Mutant(
        "the workspace comes back as it is",
        VIRTUAL,
        "        self._is_suspended = False\n        self.reset()\n",
        "        self._is_suspended = False\n",
        scenario("replays_after_resume"),
    ),
    Mutant(
        "a peer's memory stays mapped while suspended",
        VIRTUAL,
        "        for there in self._there:\n            there.detach()\n",
        "",
        scenario("replays_after_resume"),
    ),
    Mutant(
        "a fault while suspended is settled in memory that is gone",
        VIRTUAL,
        "        if not self._is_suspended:\n            super().reset()\n",
        "        super().reset()\n",
        scenario("late_for_resume"),
    ),
    Mutant(
        "suspend() does not wait for the work on the GPU",
        BACKEND,
        "        if not background.Job(self.order.wait_for_device).wait(seconds):\n",
        "        if False:\n",
        scenario("ranks_that_differ"),
    ),
    Mutant(
        "calls go through while suspended",
        SUSPENSION,
        "                calls.unusable = self._error  # an error in the block replaces it\n",
        "",
        scenario("replays_after_resume"),
    ),
    Mutant(
        "a rank goes on before all have given their memory back",
        SUSPENSION,
        '                calls.gather(calls.number, b"")  # no rank goes on unless all are suspended\n',
        "",
        scenario("suspended_driver_faults"),
    ),
    Mutant(
        "an error of the driver within suspend() does not lose the communicator",
        SUSPENSION,
        '            with calls.losing("it left suspend()"):\n',
        "            if True:\n",
        scenario("suspended_driver_faults"),
    ),
    Mutant(
        "memory that a rank has got for a resume() that is not to be is kept",
        SUSPENSION,
        "            return used\n        except BaseException:\n            self._drop_prepared(backend)\n",
        "            return used\n        except BaseException:\n",
        scenario("no_memory_to_resume"),
    ),
    Mutant(
        "the memory of a graph is given back under another communicator",
        "ipcreduce/graphs/pools.py",
        "                if len(pool.sessions) < 2:\n",
        "                if True:\n",
        scenario("pools_given_back"),
    ),
    Mutant(
        "nothing covers the addresses of graphs' memory that is given back",
        "ipcreduce/graphs/pool.py",
        "                    slab.place.cover(piece, nbytes)\n",
        "",
        scenario("pools_given_back"),
    ),
    Mutant(
        "a recording allocates from memory that is given back",
        "ipcreduce/graphs/session.py",
        "        elif pool.is_suspended:\n",
        "        elif False:\n",
        scenario("pools_given_back"),
    ),
    Mutant(
        "suspend() in a recording is not refused",
        SUSPENSION,
        "        if self._session.is_capturing:\n",
        "        if False:\n",
        scenario("not_suspended"),
    ),
    Mutant(
        "a peer's slab stays mapped while suspended",
        "ipcreduce/graphs/pools.py",
        "            if self.elsewhere is not None:\n                self.elsewhere.suspend()\n",
        "",
        scenario("direct_graphs"),
    ),
    Mutant(
        "only the first slabs of a rank are handed over",
        "ipcreduce/graphs/direct/handing_over.py",
        "    for begin in range(0, max(map(len, wanted)), MOST):\n",
        "    for begin in range(0, min(MOST, max(map(len, wanted))), MOST):\n",
        scenario("many_direct_outputs"),
    ),
    Mutant(
        "a rank hands over what it uses itself, and not what the others ask for",
        "ipcreduce/graphs/direct/registration.py",
        "for owner, slab in asked.tolist() if owner == rank}",
        "for owner, slab in self.mappings.kept() if owner == rank}",
        scenario("direct_graphs"),
    ),
    Mutant(
        "memory for a graph's pool that cannot be mapped is kept",
        "ipcreduce/graphs/pool.py",
        "                slab, handle = self._prepared[-1]\n",
        "                slab, handle = self._prepared[-1]\n                self._prepared[-1] = slab, 0\n",
        scenario("suspended_driver_faults"),
    ),
    Mutant(
        "fewer descriptors than are due are taken for all of them",
        "ipcreduce/ranks/descriptors.py",
        "            if len(descriptors) == counts[rank]:\n",
        "            if descriptors:\n",
        unit("descriptors", "several_at_once"),
    ),
    Mutant(
        "what stays while suspended can be exported",
        VIRTUAL,
        "exportable=not suspended",
        "exportable=True",
        scenario("nothing_is_shared"),
    ),
    Mutant(
        "the descriptor of a closed communicator's page waits for the garbage collector",
        BACKEND,
        "        self.page = Page.alone(0, 1)\n",
        "",
        scenario("no_descriptor_is_left"),
    ),
    Mutant(
        "the memory of a failed start waits for the garbage collector",
        "ipcreduce/ranks/exchange.py",
        "        del error  # its traceback",
        "        pass  # its traceback",
        scenario("no_descriptor_is_left"),
    ),
]
