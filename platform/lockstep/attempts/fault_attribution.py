"""Who is to blame for the failures and wrong bits of a run's attempts: a node, which then gets no more workers, or the job, which ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lockstep.attempts.attempt_summary import AttemptSummary
from lockstep.attempts.failed_nodes import FailedNodes, node_label
from lockstep.attempts.failing_micro_batches import Repeats, repeat
from lockstep.attempts.untrusted_workers import UntrustedWorkers
from lockstep.driver.run_view import RunView
from lockstep.errors import LockstepError
from lockstep.record.events.union import Corrupted, Document, Tell


class Blame:
    """The blame in one run. `warn` takes a line for a person, `tell` an event to be recorded."""

    def __init__(self, storage: str, warn: Callable[[str], None], tell: Tell) -> None:
        self._storage, self._warn, self._tell = storage, warn, tell
        self._nodes, self._untrusted_workers, self._repeats = FailedNodes(), UntrustedWorkers(), Repeats()
        self._judged: list[Corrupted] = []
        """The differences between workers that were judged."""
        self.fault_of_job: LockstepError | None = None
        """The error that ends the run, where the attempts so far show that the job is to blame."""

    @property
    def left_out(self) -> frozenset[str]:
        """The nodes that get no more workers, as long as the others have room for enough."""
        return self._nodes.left_out

    def unwell(self, nodes: Iterable[str]) -> frozenset[str]:
        """Leave out these nodes, which are slow or wrong. Returns those that are left out from now on."""
        return self._nodes.computed_wrong(nodes)

    @property
    def doubts(self) -> tuple[Corrupted, ...]:
        """Differences between workers that are still undecided; the next attempt may settle them."""
        return self._untrusted_workers.doubts

    def end(
        self, view: RunView, summary: AttemptSummary, run_id: str | None, saved_step: Callable[[], int]
    ) -> LockstepError | None:
        """Judge an attempt that has ended, with its workers or without those that it has lost. Returns the error that ends the run, where the job is to blame.

        `saved_step` gives the step of the newest checkpoint.
        """
        self._count_devices(view, summary)
        self.judge(view, summary)
        self.fault_of_job = self.fault_of_job or self._failed_alike(view, summary, run_id, saved_step)
        return self.fault_of_job

    def judge(self, view: RunView, summary: AttemptSummary) -> frozenset[str]:
        """Judge each difference between the bits of workers, once. Returns the nodes that are left out for them."""
        left_out = frozenset[str]()
        for corruption, nodes in view.differences:
            if corruption not in self._judged:
                self._judged.append(corruption)
                left_out |= self._judge(corruption, nodes, summary)
        return left_out

    def _judge(
        self, corruption: Corrupted, nodes: Mapping[int, str], summary: AttemptSummary
    ) -> frozenset[str]:
        verdict = self._untrusted_workers.judge(corruption, nodes)
        left_out = self._nodes.computed_wrong(verdict.nodes)
        summary.corrupted += map(str, (verdict.corruption, *verdict.settled))
        summary.left_out = sorted({*summary.left_out, *left_out})
        names = ", ".join(map(node_label, sorted(left_out)))
        lines = "; ".join(map(str, (verdict.corruption, *verdict.settled)))
        self._warn(f"{lines}{f'; {names} is left out from now on' if names else ''}")
        if verdict.fault_of_job:
            self.fault_of_job = verdict.fault_of_job
        elif verdict.corruption != corruption:  # two attempts together decide what this one could not
            self._tell(verdict.corruption)
        for settled in verdict.settled:
            self._tell(settled)
        return left_out

    def _count_devices(self, view: RunView, summary: AttemptSummary) -> None:
        """Count the nodes on which a device failed; one with too many failures gets no more workers."""
        nodes = {view.members[rank].node for rank in view.device_ranks if rank in view.members}
        failed = sorted(self._nodes.failed(nodes))
        summary.left_out = sorted({*summary.left_out, *failed})
        for node in failed:
            self._warn(
                f"{node_label(node)} is left out from now on: its devices have failed twice in this run"
            )

    def _failed_alike(
        self, view: RunView, summary: AttemptSummary, run_id: str | None, saved_step: Callable[[], int]
    ) -> LockstepError | None:
        """The error that ends the run where a micro-batch failed as it did before on another worker. It writes a file that reproduces the failure."""
        for broke in view.broken:
            failed_at = broke.error.failed_at
            assert failed_at is not None
            member = view.members.get(broke.rank)
            worker = ("" if member is None else member.node, broke.rank)
            who = self._repeats.failed(failed_at, worker, summary.attempt)
            if who and run_id is not None:
                failure = repeat(broke.error, failed_at, who, run_id, self._storage, saved_step())
                self._tell(Document(failure.name, failure.text))
                return failure.error
        return None
