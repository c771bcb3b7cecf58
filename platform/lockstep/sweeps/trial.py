"""One trial after another on workers that stay warm: what Tune starts, feeds and stops.

Tune's actor is rank 0 itself, and the other ranks are actors in the same placement group, so that whatever ends the
trial gives all of it back. `fit` runs in a thread; after an evaluation it waits until Tune has decided.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import ray
from ray import tune

from lockstep.attempts.hung_workers import listening
from lockstep.attempts.retry_policy import FIRST_STORAGE_PAUSE_S
from lockstep.attempts.worker_group import why_lost
from lockstep.attempts.worker_output import keep_private
from lockstep.checkpoint.runs.names import give_name, run_of_name
from lockstep.checkpoint.runs.run_checkpoints import claim, steps_of
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.checkpoint.storage.interface import Storage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.clusters.bounded_calls import answer_of
from lockstep.communication.credentials import Secret
from lockstep.communication.group import Group
from lockstep.communication.store import serve_store
from lockstep.communication.waits import COLLECTIVE_TIMEOUT
from lockstep.driver.finished_run import doubt
from lockstep.errors import (
    ClusterError,
    CorruptionError,
    SilentError,
    SpecError,
    StorageError,
    TransientStorageError,
)
from lockstep.job.identity import deciding, identity_digest
from lockstep.job.loading import load_job
from lockstep.job.recorded_source import imported_from
from lockstep.record.events.union import StageEnded, Warned
from lockstep.record.ledger.rows import EvaluationRow
from lockstep.record.ledger.tables import Rows
from lockstep.record.mirror.run_store import StoredRun
from lockstep.record.mirror.stores import find_history, find_run
from lockstep.running_time import join, wait_for
from lockstep.spec.fields import Spec
from lockstep.spec.sweep import SweepSpec
from lockstep.sweeps import problems
from lockstep.sweeps.recorders import ANSWER_S
from lockstep.sweeps.trial_rendezvous import TrialRendezvousClient, trial_rendezvous
from lockstep.sweeps.trial_run import RECORDER, TrialRun
from lockstep.sweeps.trial_workers import device, first_cause, joined, start_peers
from lockstep.training.elastic.recovery import Seat
from lockstep.training.failure import as_lockstep_error
from lockstep.training.loop import fit

PATIENCE_S = 10.0
"""How long rank 0 may take to find out by itself that another rank is gone."""

LEAVE_S = 2.0
"""How long the other ranks may take to clear away the source that was written for them."""


class Trial(tune.Trainable):  # type: ignore[misc]
    """Tune's side of a trial. A result is an evaluation; the last one has `done`, `status` and `reason`."""

    def setup(
        self,
        config: dict[str, Any],
        sweep: SweepSpec,
        sweep_id: str,
        recorders: Any,
        folder: str,
        ends: Mapping[int, Mapping[str, Any]],
        source: Mapping[str, bytes] | None,
    ) -> None:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        self._source, self._imported = source, ExitStack()
        if source:
            self._imported.enter_context(imported_from(source))
        self._sweep, self._sweep_id, self._recorders, self._folder, self._ends = (
            sweep,
            sweep_id,
            recorders,
            folder,
            ends,
        )
        self._peers = start_peers(sweep.base, folder, source)
        self._begin(config)

    def reset_config(self, config: dict[str, Any]) -> bool:
        if self._training is not None and not self._training.leave():
            self._end_peers()
            self._peers = start_peers(self._sweep.base, self._folder, self._source)
        self._begin(config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._config = config
        self._training: Training | None = None

    def step(self) -> dict[str, Any]:
        if self._training is None:
            self._training = self._start()
        return self._training.next_result()

    def _start(self) -> Training:
        number = self._config["trial"]
        return Training(
            spec_of(self._sweep, number, self._config),
            number,
            self._sweep_id,
            self._recorders,
            self._peers,
            Path(self._folder),
            self._ends.get(number),
            may_reuse=self._may_reuse,
        )

    @property
    def _may_reuse(self) -> bool:
        """Whether a finished run may stand for a trial: it has all its bits, and a population needs checkpoints besides."""
        return self._sweep.base.determinism == "strict" and not self._sweep.scheduler.has_population

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Where the state is that the last result came from: Tune's checkpoint is no more than that."""
        assert self._training is not None
        return self._training.saved()

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Nothing: the trial's configuration says which run goes on, and from where it was forked."""

    def _end_peers(self) -> None:
        if self._source:  # they have it in folders of their own; one that hangs leaves its folder behind
            ray.wait(
                [peer.leave.remote() for peer in self._peers], num_returns=len(self._peers), timeout=LEAVE_S
            )
        for peer in self._peers:
            ray.kill(peer)

    def cleanup(self) -> None:
        if self._training is not None:
            self._training.leave()
        self._end_peers()
        self._imported.close()


class Training:
    """`fit` for one trial in a thread of its own, held after each evaluation until the next result is wanted."""

    def __init__(
        self,
        spec: Spec,
        number: int,
        sweep_id: str,
        recorders: Any,
        peers: list[Any],
        folder: Path,
        end: Mapping[str, Any] | None,
        *,
        may_reuse: bool,
    ) -> None:
        self._may_reuse = may_reuse
        self.spec, self.number = spec, number
        self.results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.run_id = ""
        self._sweep_id, self._recorders, self._peers, self._end = sweep_id, recorders, peers, end
        self._rank_zero = TrialRun(recorders, str(number), {"parent": sweep_id, "trial": number}, self.give)
        self._last: dict[str, Any] = {}
        self._others: dict[int, Any] = {}
        """The work of the other ranks that are not lost, by rank."""
        self._outlived = False
        """Whether a rank was lost that the others have gone on without."""
        self._thread = threading.Thread(target=self._run, name="lockstep-trial", daemon=True)
        self._thread.start()

    # --- Tune's side -------------------------------------------------------------------------------------------

    def next_result(self) -> dict[str, Any]:
        """The next evaluation, or how the trial ended."""
        self._rank_zero.want()
        result = self.results.get()
        if "lost" in result:
            raise WorkersLostError(result["lost"])  # Tune starts the trial again
        if "step" in result:
            self._last = {}  # what another evaluation gave
        self._last |= result
        return {**self._last, "trial": self.number}

    def saved(self) -> dict[str, Any]:
        """The checkpoint of the last result, once it is written."""
        step = int(self._last["step"])
        if step not in steps_of(self.spec.checkpoint.storage, self.run_id):
            self._rank_zero.wait_for_checkpoint(step)
        return {"trial": self.number, "run": self.run_id, "step": step}

    def leave(self) -> bool:
        """End the thread where it waits; the code that ended the trial records its outcome. Whether the peers are all there, and have ended it too."""
        trains = self._thread.is_alive()
        self._rank_zero.leave()
        if trains:
            name = run_name(self._sweep_id, self.number, self.spec)
            self._recorders.leave.remote(str(self.number), name, self._rank_zero.attempt)
        if not join(self._thread, 3 * PATIENCE_S):  # it waits for a rank that is gone, and cannot be told
            os._exit(1)
        others = [*self._others.values()]
        if not others or self._outlived:
            return not self._outlived
        ended, late = ray.wait(others, num_returns=len(others), timeout=PATIENCE_S)
        return not late and not any(map(_is_lost, ended))

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._train()
        except Exception as error:  # noqa: BLE001 - whatever ended the trial is told
            self._broke(error)

    def _train(self) -> None:
        spec, key = self.spec, str(self.number)
        storage = open_storage(spec.checkpoint.storage)
        name = run_name(self._sweep_id, self.number, spec)
        run_id = run_of_name(storage, name)
        if run_id is None:
            begun: str | None = answer_of(self._recorders.begun.remote(key, name), RECORDER, ANSWER_S)
            if begun is not None:
                give_name(storage, name, begun)
            run_id = begun
        if run_id is not None:
            stored_run = find_run(spec.record.uri or "", run_id, spec.folder)
            ended = stored_run.status == "FINISHED" or self._end is not None
            if ended and (history := self._history(stored_run)) is not None:
                self._replay(stored_run, history)
                return
        origin = AttemptOrigin() if run_id is None else claim(spec.checkpoint.storage, run_id, None)
        opened = self._recorders.open.remote(
            key, name, spec, run_id, origin.attempt, len(self._peers) + 1, self._may_reuse
        )
        answer_of(opened, RECORDER, ANSWER_S)
        sender = self._rank_zero.begin(origin.attempt)
        sender.tell(listening(0))
        sender.tell(StageEnded("arrival", time.time()))
        if run_id is not None:
            self.run_id = run_id
        else:
            self._rank_zero.on_run_id = lambda new_run_id: self._name(storage, name, new_run_id)
        try:
            summary = self._fit(origin)
        finally:
            sender.close()
        if self._rank_zero.is_dismissed:
            return  # whoever ended it records its outcome, also where its last steps were taken by then
        if summary is None:
            if self._rank_zero.reused:
                self._reuse()
            return  # else Tune ends it
        self._recorders.close_trial.remote(key)
        stopped, unsaved = summary["stopped"], summary["unsaved"]
        status = "stopped" if stopped else "failed" if unsaved else "finished"
        self._over(status, unsaved, summary["weights_digest"])

    def _name(self, storage: Storage, name: str, run_id: str) -> None:
        """By its name another attempt finds the run."""
        give_name(storage, name, run_id)
        self.run_id = run_id

    def _reuse(self) -> None:
        """A finished run has this trial's identity, and so its every bit."""
        key = str(self.number)
        reused_id, rows, digest = answer_of(self._recorders.adopt.remote(key), RECORDER, ANSWER_S)
        self.run_id = answer_of(self._recorders.run_id.remote(key), RECORDER, ANSWER_S)
        self._give_all(rows)
        self._recorders.close_trial.remote(key)
        self._over("reused", f"run {reused_id} has the same identity and is finished", digest)

    def _history(self, stored_run: StoredRun) -> Rows | None:
        """The rows of a run that has ended; None where it was cut off before all were written, or only its status says that it ended."""
        if stored_run.status == "FINISHED" and doubt(
            stored_run, self.spec.record.uri or "", self.spec.folder
        ):
            return None
        try:
            history = find_history(self.spec.record.uri or "", stored_run.run_id, self.spec.folder)
        except StorageError:
            if stored_run.status == "FINISHED":
                raise
            return None
        last = history.evaluations[-1].step if history.evaluations else 0
        return (
            history if stored_run.status == "FINISHED" or last >= (self._end or {}).get("step", 0) else None
        )

    def _replay(self, stored_run: StoredRun, history: Rows) -> None:
        """A trial that had ended before the sweep was taken up again: its results, and nothing else."""
        self.run_id = stored_run.run_id
        self._give_all(history.evaluations)
        end = self._end or {}
        digest = stored_run.summary.get("weights_digest")
        self._over(end.get("status", "finished"), end.get("reason", ""), digest)

    def _fit(self, origin: AttemptOrigin) -> dict[str, Any] | None:
        spec, size = self.spec, len(self._peers) + 1
        if spec.record.private:
            keep_private()
        job = load_job(spec.job.use, spec.job.params)
        if size == 1:
            return fit(spec, job, Group.join(device()), self._rank_zero.tell, self._rank_zero, origin)
        secret, gpus = Secret(), device().type == "cuda"
        store = serve_store(ray.util.get_node_ip_address(), secret, size, COLLECTIVE_TIMEOUT, gpus=gpus)
        key = str(self.number)
        self._others = {
            rank: peer.train.remote(
                spec, origin, (store.host, store.port), secret, rank, size, self._recorders, key
            )
            for rank, peer in enumerate(self._peers, start=1)
        }
        client = TrialRendezvousClient(self._recorders, key, origin.attempt, 0)
        over = threading.Event()
        threading.Thread(target=self._watch, args=(client, over), name="lockstep-peers", daemon=True).start()
        try:
            with (
                joined(store, 0, size),
                trial_rendezvous(client, origin.attempt, 0, secret, self._seat) as rendezvous,
            ):
                group, rank_zero = Group.join(device(), outlives=True), self._rank_zero
                summary = fit(spec, job, group, rank_zero.tell, rank_zero, origin, rendezvous)
        except Exception as error:
            raise first_cause([*self._others.values()], error) from error
        finally:
            over.set()
        answer_of(
            [*self._others.values()],
            "another rank of the trial, which has trained to the end,",
            spec.faults.longest_silence_s,
        )
        return summary

    def _seat(self, group: Group, origin: AttemptOrigin | None) -> Seat:
        """Rank 0's seat in a group that goes on in memory."""
        assert origin is not None
        self._rank_zero.goes_on(origin.attempt)
        return Seat(group, self._rank_zero.tell, self._rank_zero, origin)

    def _watch(self, client: TrialRendezvousClient, over: threading.Event) -> None:
        """Until `fit` is over: have the others outlive a rank that is lost; where they cannot, or one has ended by itself, end the attempt if rank 0 waits for it."""
        waiting = {work: rank for rank, work in self._others.items()}
        while waiting and not over.is_set():
            ended, _ = ray.wait([*waiting], timeout=1.0)
            for work in ended:
                rank = waiting.pop(work)
                try:
                    ray.get(work)
                except ray.exceptions.RayError as error:
                    if self._outlives(client, rank, error):
                        continue
                    if not wait_for(over.wait, PATIENCE_S):
                        lost = problems.PROCESS_LOST(what="a worker of the trial", got=why_lost(str(error)))
                        self._broke(first_cause([*self._others.values()], lost))
                    return

    def _outlives(self, client: TrialRendezvousClient, rank: int, error: ray.exceptions.RayError) -> bool:
        """Whether the others go on without a rank whose work has failed: not where it has ended with an error of its own."""
        if not isinstance(error, ray.exceptions.RayActorError):
            return False
        with suppress(ray.exceptions.RayError, SilentError):  # without the recorders nobody goes on
            if client.lose(rank):
                self._outlived = True
                self._others = {peer: work for peer, work in self._others.items() if peer != rank}
                loss = f"rank {rank} of trial {self.number} was lost: {why_lost(str(error))}"
                self._rank_zero.tell(Warned(f"{loss}; the others go on without it"))
                return True
        return False

    def _broke(self, error: Exception) -> None:
        if isinstance(
            error, ray.exceptions.RayActorError
        ):  # where it is the recorders', the driver ends the sweep
            error = problems.PROCESS_LOST(what="a process of the sweep", got=why_lost(str(error)))
        lockstep_error = as_lockstep_error(error, "rank 0")
        self._rank_zero.broke(str(lockstep_error))
        if isinstance(lockstep_error, TransientStorageError):  # Tune begins at once with the next attempt
            self._rank_zero.pause(FIRST_STORAGE_PAUSE_S)
        if isinstance(lockstep_error, ClusterError | CorruptionError | TransientStorageError):
            self.results.put({"lost": str(lockstep_error)})
            return
        self._recorders.end_trial.remote(
            str(self.number), str(lockstep_error), traceback.format_exc(), "FAILED"
        )
        with suppress(
            ray.exceptions.RayError, SilentError
        ):  # where the store could not be opened there is no run
            ref = self._recorders.run_id.remote(str(self.number))
            self.run_id = self.run_id or answer_of(ref, RECORDER, ANSWER_S)
        self._over("failed", str(lockstep_error))

    def give(self, row: EvaluationRow) -> None:
        """A result for Tune."""
        self.results.put(self._result(row))

    def _give_all(self, rows: Sequence[EvaluationRow]) -> None:
        """The results of a run that is over; the last one comes with its end, as where it is trained."""
        for row in rows[:-1]:
            self.give(row)
        self._rank_zero.pending = rows[-1] if rows else None

    def _result(self, row: EvaluationRow) -> dict[str, Any]:
        return {"step": row.step, **row.metrics, "run_id": self.run_id}

    def _over(self, status: str, reason: str, digest: str | None = None) -> None:
        last = self._rank_zero.pending
        end = {
            "done": True,
            "status": status,
            "reason": reason,
            "weights_digest": digest,
            "run_id": self.run_id,
        }
        self.results.put(end if last is None else {**self._result(last), **end})


def _is_lost(work: Any) -> bool:
    """Whether the process that was to do this work is gone."""
    try:
        ray.get(work)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.RayError:
        return False
    return False


class WorkersLostError(RuntimeError):
    """A worker of the trial is gone; the trial goes on in another attempt."""


def spec_of(sweep: SweepSpec, number: int, config: Mapping[str, Any]) -> Spec:
    """The spec of a trial with this configuration of Tune's. SpecError where it is none."""
    more = {}
    if "fork" in config:  # another trial's state; see RecordedScheduler
        more["fork"] = {**config["fork"], "storage": sweep.base.checkpoint.storage}
    return sweep.trial(config["fields"], name=f"{sweep.base.name}-{number}", **more)


def was_begun(sweep: SweepSpec, sweep_id: str, number: int, config: Mapping[str, Any]) -> bool:
    """Whether a trial of a sweep has a run with this configuration."""
    try:
        name = run_name(sweep_id, number, spec_of(sweep, number, config))
    except SpecError:
        return False
    return run_of_name(open_storage(sweep.base.checkpoint.storage), name) is not None


def run_name(sweep_id: str, number: int, spec: Spec) -> str:
    """The name under which any attempt of a trial finds its run, however it is placed; in a population a trial goes through several."""
    digest = identity_digest(deciding(spec))
    return f"sweep-{sweep_id}-{number}-{digest[:16]}"
