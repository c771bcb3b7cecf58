"""The supervisor: it watches an attempt, and decides what follows on its end.

An attempt that lost a worker is followed at once by another from the newest good checkpoint, with as many workers as
the cluster has then. The steps since that checkpoint are taken again, with the same values, so the record stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from lockstep.checkpoint.run_folder import Origin
from lockstep.errors import ClusterError, LockstepError, RecordError, SpecError
from lockstep.orchestration.attempts import Account, claim, steps_of
from lockstep.orchestration.noticeboard import Noticeboard
from lockstep.orchestration.policy import Budget, outcome_of
from lockstep.orchestration.progress import Progress
from lockstep.orchestration.ray_trainer import Attempt, place
from lockstep.orchestration.recorder_actor import Ending, News, start_recorder
from lockstep.orchestration.result import Result, result_of
from lockstep.orchestration.signals import StopSignal
from lockstep.orchestration.surroundings import Surroundings, live_resources
from lockstep.orchestration.watchdog import Patience, end
from lockstep.spec import Spec

POLL_S = 0.3
"""How often the driver looks at a run."""


class Supervisor:
    """One run on a connected cluster."""

    def __init__(
        self,
        spec: Spec,
        progress: Progress,
        stop: StopSignal,
        origin: Origin,
        environment: Mapping[str, str],
        began_at: float,
        warnings: list[str],
        on_run_id: Callable[[str], None] = lambda run_id: None,
    ) -> None:
        self.spec = spec
        self.progress = progress
        self.stop = stop
        self.origin = origin
        self.environment = dict(environment)
        self.began_at = began_at
        self.warnings = list(warnings)
        self.accounts: list[Account] = []
        self._warned = 0
        self._moving: str | None = None
        """Why the attempt at hand is asked to end, so that the next one runs elsewhere or on more workers."""
        self._last_step_at = 0.0
        self._on_run_id = on_run_id
        self._named = False
        self._board = Noticeboard(spec.name, spec.record.uri or "", began_at)

    def run(self) -> Result:
        """Train until the run ends, in whichever way."""
        workers, resources = place(self.spec, live_resources())
        recorder = start_recorder(self.spec, self.environment, self.origin.run_id)
        try:
            ending = self._attempts(recorder, workers, resources)
            assert ending.summary is not None
            self._board.ends("KILLED" if ending.summary["stopped"] else "FINISHED", ending.summary["step"])
        except KeyboardInterrupt:
            self._board.ends("KILLED", 0)
            ray.get(recorder.ended.remote("ended at once by a second signal", "", "KILLED"))
            self._close(recorder)
            raise
        except LockstepError:
            self._board.ends("FAILED", 0)
            self._close(recorder)  # what ended the run is told; that it could not be recorded comes second
            raise
        failure = self._close(recorder)
        self._look(ray.get(recorder.news.remote()))
        if failure is not None:
            raise failure
        run_id, url, folder = ray.get(recorder.names.remote())
        return result_of(
            ending.summary,
            run_id=run_id,
            url=url,
            tracking_uri=self.spec.record.uri or "",
            folder=folder,
            began_at=self.began_at,
            warnings=self.warnings,
            attempts=self.origin.attempt,
            signal_number=self.stop.number,
        )

    def _attempts(self, recorder: Any, workers: int, resources: dict[str, float]) -> Ending:
        """One attempt after another, until one comes to an end or no other is worth it."""
        budget = Budget(self.spec.faults)
        while True:
            begun = recorder.begin.remote(self.origin.attempt)
            if self.accounts:  # else the recorder itself still starts: the workers need not wait for it
                ray.get(begun)
            attempt = Attempt(self.spec, self.origin, recorder, workers, resources, self.environment)
            first = not self.accounts and self.origin.run_id is None
            from_step = 0 if first else self._saved_step(recorder)
            account = Account(self.origin.attempt, workers, time.time(), from_step)
            self.accounts.append(account)
            self._watch(attempt, recorder, workers, resources)
            ending: Ending = ray.get(recorder.ending.remote())
            self._look(ray.get(recorder.news.remote()))
            self._name(recorder)
            account.ended = time.time()
            if ending.summary is not None:
                stopped = ending.summary["stopped"]
                account.why = self._moving or "stopped" if stopped else "finished"
                self._tell_account(recorder)
                if stopped and self._moving and not self.stop.asked:
                    self.progress.say(
                        f"attempt {self.origin.attempt} ended after a checkpoint: {self._moving}"
                    )
                    workers, resources = self._placed()
                    self.origin = self._next(recorder)
                    continue
                if stopped and self._moving:
                    ray.get(recorder.settle.remote())
                return ending
            error = ending.error or attempt.error or ClusterError("the workers ended without a result")
            account.why = str(error)
            self._tell_account(recorder)
            decision = budget.decide(outcome_of(error), self._saved_step(recorder))
            if not decision.again or self.stop.asked:
                more = "" if len(self.accounts) == 1 else f" (attempt {self.origin.attempt}; {decision.why})"
                ray.get(recorder.ended.remote(f"{error}{more}", ending.details, "FAILED"))
                raise error if not more else type(error)(f"{error}{more}")
            self.progress.say(f"attempt {self.origin.attempt} ended: {error}; {decision.why}")
            self.stop.wait(decision.pause_s)
            workers, resources = self._placed()
            self.origin = self._next(recorder)

    def _watch(self, attempt: Attempt, recorder: Any, workers: int, resources: dict[str, float]) -> None:
        """Until the attempt ends: show its progress, hand on a signal, end it where nothing can be recorded."""
        self._moving = None
        surroundings = Surroundings(self.spec, workers, resources)
        attempt.start()
        told, patience = False, Patience(self.spec.faults.longest_silence_s)
        while not attempt.over.wait(POLL_S):
            if self.stop.asked and not told:
                told = True
                recorder.stop.remote(signal_number=self.stop.number)
                self.progress.say("stopping after the next step; a second signal ends the run at once")
            news: News = ray.get(recorder.news.remote())
            if patience.is_over(news.alive, time.monotonic()):
                self._end_hung(attempt, recorder, patience.bound_s)
                return
            if news.failure is not None and not news.recording:
                recorder.stop.remote()
                attempt.over.wait()
                raise news.failure
            self._look(news)
            self._name(recorder)
            if self._moving is None and not told and self.accounts[-1].last_step:
                self._moving = surroundings.reason_to_move(ray.get(recorder.members.remote()))
                if self._moving is not None:
                    recorder.stop.remote(moving=True)

    def _name(self, recorder: Any) -> None:
        """Tell once which run this is, as soon as it exists: what is lost later can be resumed."""
        run_id = None if self._named else ray.get(recorder.known_run_id.remote())
        if run_id is not None:
            self._named = True
            self._board.begins(run_id, self.accounts[-1].workers)
            self._on_run_id(run_id)

    def _end_hung(self, attempt: Attempt, recorder: Any, bound_s: float) -> None:
        """End an attempt that makes no progress; its ranks' stacks go into the record."""
        self.progress.say(f"no progress for {bound_s:.0f} s: the attempt is ended")
        stacks = end(ray.get(recorder.members.remote()))
        name = f"stacks-attempt-{self.origin.attempt}.txt"
        text = "\n\n".join(f"--- rank {rank}: {stack}" for rank, stack in sorted(stacks.items()))
        recorder.document.remote(name, text)
        attempt.over.wait()
        attempt.error = ClusterError(
            f"no rank made progress for {bound_s:.0f} s, so the attempt was ended; what each was doing is in {name} "
            "(faults.longest_silence_s is the shortest time for that)"
        )
        ray.get(recorder.broke.remote(self.origin.attempt, attempt.error, text))

    def _look(self, news: News) -> None:
        """Take in what is new of the attempt at hand."""
        for text in news.warnings[self._warned :]:
            self.progress.say(f"warning: {text}")
            self.warnings.append(text)
        self._warned = len(news.warnings)
        self.progress.show(news.step, news.evaluation, news.total_steps)
        account, row = self.accounts[-1], news.step
        if row is None or row.attempt != account.attempt:
            return
        if not account.last_step and len(self.accounts) > 1:
            before = self.accounts[-2]
            account.repeated = max(0, before.last_step - account.from_step)
            account.lost_s = row.wall_clock - self._last_step_at
            self.progress.say(
                f"attempt {account.attempt} goes on with {account.workers} workers after {account.lost_s:.1f} s; "
                f"{account.repeated} steps are taken again"
            )
        account.last_step, self._last_step_at = row.step, row.wall_clock
        self._board.reached(row.step, account.workers)

    def _tell_account(self, recorder: Any) -> None:
        recorder.account.remote([account.as_dict() for account in self.accounts])

    def _placed(self) -> tuple[int, dict[str, float]]:
        """As many workers as there is room for now. Waits for `workers.min` of them, for as long as the spec allows."""
        until, told = time.monotonic() + self.spec.faults.wait_for_workers_s, False
        while True:
            try:
                return place(self.spec, live_resources())
            except SpecError as error:
                if time.monotonic() >= until or self.stop.asked:
                    raise ClusterError(
                        f"{error}; waited {self.spec.faults.wait_for_workers_s:g} s (faults.wait_for_workers_s)"
                    ) from error
                if not told:
                    self.progress.say(f"waiting for workers: {error}")
                    told = True
                self.stop.wait(1.0)

    def _saved_step(self, recorder: Any) -> int:
        run_id = self.origin.run_id or ray.get(recorder.known_run_id.remote())
        return max(steps_of(self.spec, run_id), default=0) if run_id else 0

    def _next(self, recorder: Any) -> Origin:
        """The next attempt; whatever still runs of the one before can publish nothing from here on."""
        run_id = self.origin.run_id or ray.get(recorder.known_run_id.remote())
        if run_id is None:  # it ended before there was a run
            return Origin(None, self.origin.attempt + 1)
        return claim(self.spec, run_id, None, at_least=self.origin.attempt + 1)

    def _close(self, recorder: Any) -> RecordError | None:
        """Let the recorder write what is left; what it could not write."""
        failure: RecordError | None = ray.get(recorder.close.remote())
        return failure
