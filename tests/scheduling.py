"""Which tests run in one process, and what happens to the others where a process ends."""

from __future__ import annotations

from zlib import crc32

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

IN_THEIR_OWN_PROCESS = (
    "test_average",
    "test_checked_phases",
    "test_invisible_rehearsal",
    "test_joining",
    "test_other_identity",
    "test_outside",
    "test_public_programs",
    "test_self_check",
    "test_spare",
)
"""Files of tests/distributed that train in the process of the test, most of the time: a pool need not wait for them."""

POOLS = 2
"""Processes that keep a pool of ranks: with one, its tests would take longer than all others together."""


class Together(LoadScopeScheduling):
    """Which tests stay in one process: all that start Ray, those of a pool, and those of a file.

    One Ray cluster at a time: several on a machine of two cores wait for each other past every limit.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        folder = path.removeprefix("tests/").partition("/")[0]
        if path.rpartition("/")[2].removesuffix(".py") in IN_THEIR_OWN_PROCESS:
            return path
        pool = f"pool {crc32(path.encode()) % POOLS}"
        return {"cluster": "ray", "chaos": "ray", "distributed": pool, "gpu": pool}.get(folder, path)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take back what a process that has ended had left. Returns the test in which it ended, which has failed; None where it had none left.

        xdist would hand out again all scopes that the process ever had, those that are done among them. Who gets such a one has nothing to
        run and asks for nothing more, so that in the end every process waits. And it would run the test again that ended the process.
        """
        left = {
            scope: tests for scope, tests in self.assigned_work.pop(node).items() if not all(tests.values())
        }
        if not left:
            return None
        tests = next(iter(left.values()))
        ended_in = next(test for test, is_done in tests.items() if not is_done)
        tests[ended_in] = True
        self.workqueue.update({scope: tests for scope, tests in left.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return ended_in
