"""The account of a run on Ray: its attempts so far, and what is told of them to the person, the record, the run registry and the cluster's metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from lockstep.attempts.attempt_summary import AttemptSummary
from lockstep.attempts.cluster_view import ClusterView
from lockstep.attempts.mailbox import WentOn
from lockstep.attempts.recording import Recording
from lockstep.driver.options import HeardAlerts, RunOptions
from lockstep.driver.run_view import RunView
from lockstep.record.alerts import WAITING
from lockstep.record.events.union import Alerted, AttemptsSummarised, Warned
from lockstep.record.ledger.rows import StepRow
from lockstep.record.recorder_state import RecorderState
from lockstep.spec.fields import Spec


class RunAccount:
    """The attempts of one run, the newest last. `warnings` are those of the whole run, `on_run_id` is called once the run exists."""

    def __init__(
        self,
        spec: Spec,
        options: RunOptions,
        recording: Recording,
        around: ClusterView,
        warnings: list[str],
        on_run_id: Callable[[str], None],
    ) -> None:
        self.say = options.progress.say
        self._alerts, self._waiting_s = HeardAlerts(options), spec.alert.waiting_s
        self.warnings = list(warnings)
        self.attempts: list[AttemptSummary] = []
        self.saved = False
        """Whether the workers have told of a checkpoint."""
        self.table_versions: Mapping[str, str] = {}
        """Those in which the run reads tables that change, as its workers told."""
        self.is_named = False
        """Whether the run's id was told."""
        self.run_registry = around.run_registry(spec.name, spec.record.uri or "", options.began_at)
        self._gauges = around.gauges(spec.name)
        self._progress, self._recording, self._on_run_id = options.progress, recording, on_run_id
        self._start = options.start
        self._warned = 0
        """How many of the workers' warnings are told."""
        self._last_step_at = 0.0
        """When the newest step was done, Unix time."""
        self._previous_ends: Mapping[str, float] = {}
        """When the attempt before came to the end of its stages."""

    @property
    def current(self) -> AttemptSummary:
        """The newest attempt."""
        return self.attempts[-1]

    def begin(self, attempt: int, workers: int) -> None:
        """An attempt begins, whose workers are started."""
        self.attempts.append(AttemptSummary(attempt, workers, time.time()))

    def end(self, stage_ends: Mapping[str, float]) -> None:
        """The newest attempt has ended, and came to the end of its stages at these times."""
        self.current.ended = time.time()
        self._previous_ends = stage_ends

    def went_on(self, attempt: int, began: WentOn, why: str, *, planned: bool) -> None:
        """The newest attempt has ended, and workers of it go on in their processes as another one."""
        previous = self.current
        previous.why, previous.ended, previous.planned = why, began.at, planned
        previous.last_step = max(previous.last_step, began.step)
        self.attempts.append(
            AttemptSummary(
                attempt,
                began.workers,
                began.at,
                from_step=began.step,
                in_memory=True,
                joined=began.joined,
            )
        )
        self._previous_ends = {"detection": began.at}
        more = f", and {began.joined} join them" if began.joined else ""
        self.say(f"attempt {previous.attempt} ended: {why}; the others go on from step {began.step}{more}")
        self.publish()

    def started(self, stage_ends: Mapping[str, float]) -> None:
        """The call has done its first step."""
        for stage, at in stage_ends.items():
            self._start.note(stage, at)

    def continued(self, stage_ends: Mapping[str, float]) -> None:
        """The newest attempt, which follows another, has done its first step: tell what the loss of that one cost."""
        self.current.follows(self.attempts[-2], self._last_step_at, self._previous_ends, stage_ends)
        self.say(f"attempt {self.current.attempt} continues {self.current.cost()}")

    def show(self, view: RunView, recorder: RecorderState) -> None:
        """Tell what is new of the run."""
        self.saved = self.saved or view.saved
        self.table_versions = view.table_versions or self.table_versions
        for text in view.warnings[self._warned :]:
            self.warn(text)
        self._warned = len(view.warnings)
        self.hear(recorder)
        if (line := view.progress_line()) is not None:
            self._progress.show(line)

    def newest_step(self, view: RunView) -> StepRow | None:
        """The newest step that the newest attempt has done itself: not one whose row it has restored, which is of the same attempt where a span is taken again."""
        row = view.step
        of_it = row is not None and row.attempt == self.current.attempt and "first_step" in view.stage_ends
        return row if of_it else None

    def reached(self, row: StepRow) -> None:
        """The newest attempt has done this step."""
        first = not self.current.last_step
        self.current.last_step, self._last_step_at = row.step, row.wall_clock
        self.run_registry.reached(row.step, self.current.workers)
        if self._recording.run_id is not None:
            self._gauges.show(self._recording.run_id, row, self.current.workers)
        if first:
            self.publish()

    def slowed(self, view: RunView) -> None:
        """Take in which ranks keep the others waiting."""
        if len(view.stragglers) > len(self.current.stragglers):
            if not self.current.stragglers:  # once an attempt is enough for a person who looks on
                self.warn(view.stragglers[0])
            self.current.stragglers = list(view.stragglers)
            self.publish()

    def name(self) -> None:
        """Tell once which run this is, as soon as it exists: what is lost later can be resumed."""
        run_id = self._recording.run_id
        if run_id is None:
            return
        if not self.is_named:
            self.is_named = True
            self.run_registry.begins(run_id, self.current.workers)
            self._on_run_id(run_id)
        self._recording.named()

    def hear(self, recorder: RecorderState) -> None:
        """Tell what the run has shown to be wrong with it. A recorder that took another's place has not told it again."""
        for text in recorder.diagnosed:
            if text not in self.warnings:
                self.warn(text)
        self._alerts.hear(recorder.alerted)

    @contextmanager
    def waiting(self) -> Iterator[Callable[[str], None]]:
        """What the search for room is told with: where it goes on for as long as the spec says, that is an alert."""
        reasons: list[str] = []

        def tell(text: str) -> None:
            reasons.append(text)
            self.say(text)

        def fire() -> None:
            if reasons:
                step = self.attempts[-1].last_step if self.attempts else 0
                alert = Alerted(WAITING, step, reasons[-1])
                if self._recording.run_id is not None:  # else there is no record yet, and the person is told
                    self._recording.tell(alert)
                self._alerts.hear([alert])

        timer = None if self._waiting_s is None else threading.Timer(self._waiting_s, fire)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield tell
        finally:
            if timer is not None:
                timer.cancel()

    def warn(self, text: str) -> None:
        """Tell the person."""
        self.say(f"warning: {text}")
        self.warnings.append(text)

    def warn_and_record(self, text: str) -> None:
        """Warn of what the driver has found: the workers' warnings and the recorder's are recorded already."""
        self.warn(text)
        self._recording.tell(Warned(text))

    def publish(self) -> None:
        """Have the account recorded as it stands."""
        self._recording.tell(AttemptsSummarised([summary.as_dict() for summary in self.attempts]))
