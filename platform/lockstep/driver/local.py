"""A run in this process: alone, or as one rank under `torchrun`. No Ray anywhere; a debugger works."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

from lockstep.checkpoint.errors import StaleAttemptError
from lockstep.checkpoint.runs.run_checkpoints import pin_aliased, read_shared
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.communication.group import Group, distributed, local_device
from lockstep.driver.failure_report import with_run
from lockstep.driver.guardian import Guardian, ending_line
from lockstep.driver.options import HeardAlerts, RunOptions
from lockstep.driver.progress import Progress
from lockstep.driver.result import Result, check_saved, result_of
from lockstep.driver.run_view import RunView
from lockstep.driver.signals import StopSignal, end_command
from lockstep.driver.stacks import stacks_on_signal
from lockstep.errors import LockstepError, RecordError, SilentError
from lockstep.job.loading import load_job
from lockstep.periodic import periodically
from lockstep.process import under_torchrun
from lockstep.record.events.union import (
    MEMORY_SNAPSHOT,
    PICKLE,
    Document,
    Event,
    Failed,
    Finished,
    Sampled,
    Started,
    Straggling,
    TakenOver,
    Warned,
    tell_nobody,
)
from lockstep.record.ledger.goodput import spent_text
from lockstep.record.recorder import Recorder
from lockstep.record.system_metrics import sampled
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.observe.memory_snapshot import memory_watched


class RankRequests(NoRequests):
    """Under torchrun every rank hears of signals by itself."""

    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop

    def stop(self) -> bool:
        return self._stop.asked


class LocalRun:
    """Rank 0's run in this process: takes its events to the recorder and to the progress line, and says what is asked of it."""

    def __init__(
        self,
        recorder: Recorder,
        stop: StopSignal,
        progress: Progress,
        on_run_id: Callable[[str], None],
        attempt: int,
        guardian: Guardian,
        alerts: HeardAlerts,
    ) -> None:
        self._alerts = alerts
        self.recorder, self.view = recorder, RunView(attempt)
        self._stop, self._progress, self._on_run_id = stop, progress, on_run_id
        self._named = self._stopped = False
        self._guardian = guardian
        self._snapshots: dict[str, str] = {}

    def tell(self, event: Event) -> None:
        """Take an event of the run. The run is created with its first facts: what is found before leaves nothing behind."""
        if isinstance(event, Started):
            if not self.recorder.started:
                self.recorder.start()
            self._guardian.recorded_by(self.recorder.state.pid)
            if (
                not self.recorder.apart
            ):  # loader processes, forked while its thread imports, could wait for that for ever
                self.recorder.run_id()
        if isinstance(event, Document) and event.name.startswith(MEMORY_SNAPSHOT):
            self._keep_snapshot(event)
        if isinstance(event, Straggling):
            event = Warned(
                event.text
            )  # alone, or under torchrun: there is no account of attempts to put it in
        if isinstance(event, Warned):
            self._progress.say(f"warning: {event.text}")
        if isinstance(event, Finished):
            event = Finished({**event.summary, "signal": self._stop.number}, event.files)
        self.view.take(event)
        self._guardian.alive(self.view.signs_of_life)
        self.recorder.tell(event)

    def _keep_snapshot(self, document: Document) -> None:
        """Have what this process held in the record, whatever becomes of it: its recorder may be killed with it before it has written."""
        if not self.recorder.started:  # what was held before the first step needs a record too
            self.recorder.start()
        if not document.name.endswith(PICKLE):
            self._snapshots[document.name] = document.text
            self._guardian.tell(documents=self._snapshots)
        if document.tells_memory:
            self._guardian.tell(memory=document.memory_line)

    def end_hung(self, error: SilentError, stacks: str) -> None:
        """End this process, in which the run hangs: called in a thread, where Python still runs in another one."""
        if not self.recorder.started:
            self.recorder.start()
        self.recorder.tell(Document("stacks.txt", stacks), Failed(str(error), stacks))
        problem = ""
        try:
            self.recorder.close()
        except RecordError as unwritten:
            problem = str(unwritten)
        self._guardian.release(notifies=True)
        state = self.recorder.state
        line = ending_line(str(error), state.run_id, Path(state.folder).parent, problem)
        end_command(error.with_message(line))
        os.write(2, f"lockstep: {line}\n".encode())
        os._exit(error.exit_code)  # the caller's own thread can hear of nothing any more

    def stop(self) -> bool:
        """A signal came, or the run cannot be recorded anywhere."""
        state = self.recorder.state
        if self._stop.asked and not self._stopped:
            self._stopped = True
            self._guardian.tell(signal=self._stop.number)
        return self._stop.asked or (state.run_id is None and state.failure is not None)

    def save(self) -> bool:
        return False

    def regroup(self) -> bool:
        return False

    def run_id(self) -> str:
        return self.recorder.run_id()

    def go_on(self, look: Callable[[], object], *, ends: bool) -> bool:
        """Called before the first step, once the run's id is shown: from then on a run that is stopped can be resumed."""
        if not self._named:
            self._named = True
            run_id = self.recorder.run_id()
            self._guardian.tell(run_id=run_id)
            self._guardian.recorded_by(self.recorder.state.pid)
            self._progress.say(f"run {run_id}")
            self.show()
            self._on_run_id(run_id)
        return True

    def hear(self) -> None:
        """Tell what the run has shown to be wrong with it since it was asked last."""
        for text in self.recorder.state.diagnosed:
            if text not in self.view.warnings:
                self.view.take(Warned(text))
                self._progress.say(f"warning: {text}")
        self._alerts.hear(self.recorder.state.alerted)

    def show(self) -> None:
        """Bring the progress line up to now."""
        self.hear()
        if (line := self.view.progress_line()) is not None:
            self._progress.show(line)

    def shown(self) -> AbstractContextManager[None]:
        """Show how it goes twice a second, from a thread of its own."""
        return periodically(lambda: self.show, 0.5, "lockstep-progress")


def train_here(
    spec: Spec,
    options: RunOptions,
    stop: StopSignal,
    origin: AttemptOrigin,
    warnings: list[str],
    on_run_id: Callable[[str], None],
) -> Result | None:
    """Train in this process. Under torchrun every rank calls it, and all but rank 0 get None."""
    device = local_device(spec)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with distributed(backend) if under_torchrun() else nullcontext():
        group = Group.join(device)
        if group.rank > 0:
            job = load_job(spec.job.use, spec.job.params)
            with memory_watched(_print_memory, group.rank, origin.attempt):
                fit(spec, job, group, tell_nobody, RankRequests(stop), origin)
            return None
        watched = spec.faults.longest_silence_s, spec.faults.longest_start_s
        with (
            stacks_on_signal() as stacks,
            Guardian(
                spec.document(),
                spec.folder,
                watched=watched,
                notify=options.notify,
                webhook=options.webhook,
                say=options.progress.say,
            ) as guardian,
        ):
            guardian.tell(stacks=stacks)
            run = _start(spec, options, stop, origin, on_run_id, guardian)
            guardian.on_hung = run.end_hung
            summary = _fit_recorded(spec, group, run, origin, guardian)
    run.hear()
    record = run.recorder.state
    if record.violation:
        run.view.take(Warned(record.violation))
        options.progress.say(f"warning: {record.violation}")
    if record.time_spent is not None and record.time_spent.interruptions:
        options.progress.say(spent_text(record.time_spent))
    check_saved(summary, record.run_id or "", record.folder)
    return result_of(
        summary,
        run_id=record.run_id or "",
        url=record.url,
        tracking_uri=spec.record.uri or "",
        folder=record.folder,
        began_at=options.began_at,
        start={**options.start.at, **run.view.stage_ends},
        warnings=[*warnings, *run.view.warnings, *guardian.warnings],
        attempts=origin.attempt,
        signal_number=stop.number,
        time_spent=record.time_spent,
    )


def _print_memory(event: Event) -> None:
    """Say what a rank other than 0 held: under torchrun it has no way to the record."""
    if isinstance(event, Document) and event.tells_memory:
        os.write(2, event.text.encode())


def _start(
    spec: Spec,
    options: RunOptions,
    stop: StopSignal,
    origin: AttemptOrigin,
    on_run_id: Callable[[str], None],
    guardian: Guardian,
) -> LocalRun:
    apart = spec.record.uri != RECORD_OFF  # MLflow's part would take this process some 100 ms of each second
    recorder = Recorder(
        spec,
        run_id=origin.run_id,
        on_aliases=partial(pin_aliased, spec.checkpoint.storage),
        fetch=partial(read_shared, spec.checkpoint.storage),
        source=Path.cwd(),
        apart=apart,
    )
    recorder.warm_up()
    if origin.run_id is not None:  # it exists: how this attempt ends belongs to it
        recorder.start()
    alerts = HeardAlerts(options)
    return LocalRun(recorder, stop, options.progress, on_run_id, origin.attempt, guardian, alerts)


def _fit_recorded(
    spec: Spec, group: Group, run: LocalRun, origin: AttemptOrigin, guardian: Guardian
) -> dict[str, object]:
    """`fit`, whose end is recorded whatever it is."""
    recorder = run.recorder

    def sample(values: dict[str, float]) -> None:
        recorder.tell(Sampled("node-0", time.time(), values))

    try:
        with run.shown(), sampled(sample), memory_watched(run.tell, group.rank, origin.attempt):
            summary = fit(spec, load_job(spec.job.use, spec.job.params), group, run.tell, run, origin)
        run.show()
        guardian.tell(watched=None)  # the rest is the recorder's, which has limits of its own
    except BaseException as error:
        guardian.tell(watched=None)
        if not recorder.started:
            recorder.close()
            if isinstance(error, LockstepError):
                raise with_run(error, None, spec.folder) from error
            raise
        ended = _ended(error)
        recorder.tell(ended)
        with suppress(RecordError):  # what ended the run is told; that it could not be recorded comes second
            recorder.close()
        if recorder.lost and isinstance(ended, Failed):
            guardian.record(ended.message, ended.details, ended.status)
        run.show()
        if isinstance(error, LockstepError) and recorder.state.run_id is not None:
            raise with_run(error, recorder.run_id(), spec.folder) from error
        raise
    try:
        recorder.close()
    except RecordError as error:
        if recorder.lost:
            guardian.record(str(error), "")
        raise
    assert summary is not None  # nobody ends it at the gate
    return summary


def _ended(error: BaseException) -> Failed | TakenOver:
    """What is recorded of a run that an error ends. Where a newer attempt goes on, the run's status is that one's."""
    if isinstance(error, StaleAttemptError):
        return TakenOver(str(error))
    if isinstance(error, KeyboardInterrupt):
        return Failed("ended at once by a signal", traceback.format_exc(), "KILLED")
    return Failed(str(error), traceback.format_exc())
