"""One trial after another on workers that stay warm: what Tune starts, feeds and stops.

Tune's actor is rank 0 itself, and the other ranks are actors in the same placement group, so that whatever ends the
trial gives all of it back. `fit` runs in a thread; after an evaluation it waits until Tune has decided.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import tune
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lockstep.checkpoint.run_folder import Origin
from lockstep.checkpoint.storage import Storage, open_storage
from lockstep.errors import ClusterError, LockstepError, StorageError
from lockstep.identity import PLACEMENT
from lockstep.job import load_job
from lockstep.orchestration.attempts import claim
from lockstep.orchestration.local import NoRecord
from lockstep.orchestration.named_runs import give_name, run_of_name
from lockstep.orchestration.recorder_actor import RemoteRecord
from lockstep.orchestration.sweeps.recorders import Channel
from lockstep.record.ledger import CheckpointRow, EvaluationRow, History
from lockstep.record.run_store import find_history, find_run
from lockstep.spec import Spec
from lockstep.sweep_spec import SweepSpec
from lockstep.training.failure import told
from lockstep.training.group import COLLECTIVE_TIMEOUT, Group
from lockstep.training.loop import fit

PATIENCE_S = 10.0
"""How long rank 0 may take to find out by itself that another rank is gone."""


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
    ) -> None:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        self._sweep, self._sweep_id, self._recorders, self._folder, self._ends = (
            sweep,
            sweep_id,
            recorders,
            folder,
            ends,
        )
        self._peers = start_peers(sweep.base, folder)
        self._begin(config)

    def reset_config(self, config: dict[str, Any]) -> bool:
        self._leave()
        self._begin(config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._config = config
        self._taken: dict[str, Any] | None = None
        self._training: Training | None = None

    def step(self) -> dict[str, Any]:
        if self._training is None:
            self._training = self._start()
        return self._training.next_result()

    def _start(self) -> Training:
        number, fields = self._config["trial"], self._config["fields"]
        fork = None
        if self._taken is not None:
            fork = (
                self._taken["fork"]
                if self._taken["trial"] == number
                else {
                    "run": self._taken["run"],
                    "step": self._taken["step"],
                    "storage": self._sweep.base.checkpoint.storage,
                }
            )
        name = f"{self._sweep.base.name}-{number}"
        spec = self._sweep.trial(fields, name=name, **({"fork": fork} if fork else {}))
        return Training(
            spec,
            number,
            fork,
            self._sweep_id,
            self._recorders,
            self._peers,
            Path(self._folder),
            self._ends.get(number),
        )

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Where the state is that the last result came from: Tune's checkpoint is no more than that."""
        assert self._training is not None
        return self._training.saved()

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._taken = checkpoint

    def _leave(self) -> None:
        if self._training is not None:
            self._training.leave()

    def cleanup(self) -> None:
        self._leave()
        for peer in self._peers:
            ray.kill(peer)


class Training:
    """`fit` for one trial in a thread of its own, held after each evaluation until the next result is wanted."""

    def __init__(
        self,
        spec: Spec,
        number: int,
        fork: Mapping[str, Any] | None,
        sweep_id: str,
        recorders: Any,
        peers: list[Any],
        folder: Path,
        end: Mapping[str, Any] | None,
    ) -> None:
        self.spec, self.number, self.fork = spec, number, fork
        self.results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.run_id = ""
        self._sweep_id, self._recorders, self._peers, self._end = sweep_id, recorders, peers, end
        self._channel = Channel(recorders, str(number))
        self._record = TrialRecord(self._channel, folder, {"parent": sweep_id, "trial": number}, self.give)
        self._last: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="lockstep-trial", daemon=True)
        self._thread.start()

    # --- Tune's side -------------------------------------------------------------------------------------------

    def next_result(self) -> dict[str, Any]:
        """The next evaluation, or how the trial ended."""
        self._record.go_on()
        result = self.results.get()
        if "lost" in result:
            raise WorkersLostError(result["lost"])  # Tune starts the trial again
        self._last |= result
        return {**self._last, "trial": self.number}

    def saved(self) -> dict[str, Any]:
        """The checkpoint of the last result, once it is written."""
        step = int(self._last["step"])
        self._record.wait_for_checkpoint(step)
        return {"trial": self.number, "run": self._record.run_id(), "step": step, "fork": self.fork}

    def leave(self) -> None:
        """End the thread where it waits; what has become of the trial is recorded by whoever decided it."""
        self._record.leave()
        self._thread.join(3 * PATIENCE_S)
        if self._thread.is_alive():  # it waits for a rank that is gone, and cannot be told
            os._exit(1)

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._train()
        except LeftError:
            pass
        except ReusedError:
            self._reuse()
        except Exception as error:  # noqa: BLE001 - whatever ended the trial is told
            self._broke(error)

    def _train(self) -> None:
        spec, key = self.spec, str(self.number)
        storage = open_storage(spec.checkpoint.storage)
        name = run_name(self._sweep_id, self.number, spec)
        run_id = run_of_name(storage, name)
        status = None
        if run_id is not None:
            found = find_run(spec.record.uri or "", run_id, spec.folder)
            status = found.status
        if run_id is not None and (status == "FINISHED" or self._end is not None):
            self._replay(run_id)
            return
        origin = Origin() if run_id is None else claim(spec, run_id, None)
        ray.get(self._recorders.open.remote(key, spec, run_id, origin.attempt))
        self._record.begin(origin.attempt)
        if run_id is not None:
            self.run_id = run_id
        else:
            self._record.on_run_id = lambda found: self._name(storage, name, found)
        summary = self._fit(origin)
        self._recorders.close_trial.remote(key)
        stopped = summary["stopped"]
        self._over("stopped" if stopped else "finished", "", summary["weights_digest"])

    def _name(self, storage: Storage, name: str, run_id: str) -> None:
        """By its name another attempt finds the run."""
        give_name(storage, name, run_id)
        self.run_id = run_id

    def _reuse(self) -> None:
        """A finished run has this trial's identity, and so its every bit."""
        found = ray.get(self._channel.reused.remote())
        rows = ray.get(self._channel.adopt.remote())
        self.run_id = ray.get(self._channel.run_id.remote())
        for row in rows:
            self.give(row)
        self._recorders.close_trial.remote(str(self.number))
        self._over("reused", f"run {found} has the same identity and is finished")

    def _replay(self, run_id: str) -> None:
        """A trial that had ended before the sweep was taken up again: its results, and nothing else."""
        self.run_id = run_id
        for row in find_history(self.spec.record.uri or "", run_id, self.spec.folder).evaluations:
            self.give(row)
        end = self._end or {}
        self._over(end.get("status", "finished"), end.get("reason", ""))

    def _fit(self, origin: Origin) -> dict[str, Any]:
        spec, size = self.spec, len(self._peers) + 1
        job = load_job(spec.job.use, spec.job.params)
        if size == 1:
            return fit(spec, job, Group.join(device()), self._record, origin)
        store = TCPStore(ray.util.get_node_ip_address(), 0, size, is_master=True, wait_for_workers=False)
        others = [
            peer.train.remote(spec, origin, store.host, store.port, rank, size)
            for rank, peer in enumerate(self._peers, start=1)
        ]
        over = threading.Event()
        threading.Thread(target=self._watch, args=(others, over), name="lockstep-peers", daemon=True).start()
        try:
            with joined(store, 0, size):
                summary = fit(spec, job, Group.join(device()), self._record, origin)
        except Exception as error:
            raise first_cause(others, error) from error
        finally:
            over.set()
        ray.get(others)
        return summary

    def _watch(self, others: list[Any], over: threading.Event) -> None:
        """Until `fit` is over: end the attempt where another rank has ended, and rank 0 waits for it all the same."""
        waiting = list(others)
        while waiting and not over.is_set():
            ended, waiting = ray.wait(waiting, timeout=1.0)
            try:
                ray.get(ended)
            except ray.exceptions.RayError as error:
                if not over.wait(PATIENCE_S):
                    lost = ClusterError(f"a worker of the trial is gone: {type(error).__name__}")
                    self._broke(first_cause(others, lost))
                return

    def _broke(self, error: Exception) -> None:
        known = error if isinstance(error, LockstepError) else told(error, "rank 0")
        if isinstance(known, ClusterError):
            self.results.put({"lost": str(known)})
            return
        self._recorders.end_trial.remote(str(self.number), str(known), traceback.format_exc(), "FAILED")
        with suppress(ray.exceptions.RayError):  # where the store could not be opened there is no run
            self.run_id = self.run_id or ray.get(self._channel.run_id.remote())
        self._over("failed", str(known))

    def give(self, row: EvaluationRow) -> None:
        """A result for Tune."""
        self.results.put(self._result(row))

    def _result(self, row: EvaluationRow) -> dict[str, Any]:
        return {"step": row.step, **row.metrics, "run_id": self.run_id}

    def _over(self, status: str, reason: str, digest: str | None = None) -> None:
        last = self._record.pending
        end = {
            "done": True,
            "status": status,
            "reason": reason,
            "weights_digest": digest,
            "run_id": self.run_id,
        }
        self.results.put(end if last is None else {**self._result(last), **end})


class TrialRecord(RemoteRecord):
    """The record of rank 0, which holds `fit` between an evaluation and the next step until Tune wants to know more."""

    def __init__(
        self, channel: Any, folder: Path, facts: Mapping[str, Any], give: Callable[[EvaluationRow], None]
    ) -> None:
        super().__init__(channel, folder, attempt=1)
        self.pending: EvaluationRow | None = None
        """An evaluation that Tune has not been given yet."""
        self.on_run_id: Callable[[str], None] | None = None
        self._facts, self._give = dict(facts), give
        self._asked_run: Any = None
        self._wanted = threading.Event()
        self._left = False
        self._save_errors: dict[int, str | None] = {}
        self._saved = threading.Condition()

    # --- Tune's side -------------------------------------------------------------------------------------------

    def begin(self, attempt: int) -> None:
        self._attempt = attempt

    def go_on(self) -> None:
        self._wanted.set()

    def leave(self) -> None:
        self._left = True
        self._wanted.set()

    def wait_for_checkpoint(self, step: int) -> None:
        """Until the checkpoint of a step is published. StorageError where it was given up."""
        with self._saved:
            self._saved.wait_for(lambda: step in self._save_errors)
        if self._save_errors[step] is not None:
            raise StorageError(f"the checkpoint of step {step} could not be saved: {self._save_errors[step]}")

    # --- fit's -------------------------------------------------------------------------------------------------

    def started(self, facts: Mapping[str, Any]) -> None:
        super().started({**facts, **self._facts})
        if self.on_run_id is not None:
            self._asked_run = self._actor.known_or_reused.remote()

    def restored(self, history: History) -> None:
        super().restored(history)
        for row in history.evaluations:
            self._give(row)

    def evaluation(self, row: EvaluationRow) -> None:
        super().evaluation(row)
        self._learn(wait=True)
        self.pending = row

    def stopping(self) -> bool:
        self._learn(wait=False)
        if self.pending is not None:
            self._wanted.clear()
            row, self.pending = self.pending, None
            self._give(row)
            self._wanted.wait()
            if self._left:
                raise LeftError
        return super().stopping()

    def finished(self, summary: Mapping[str, Any], weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._learn(wait=True)
        super().finished(summary, weights)

    def run_id(self) -> str:
        self._learn(wait=True)
        return super().run_id()

    def checkpoint(self, row: CheckpointRow) -> None:
        super().checkpoint(row)
        with self._saved:
            self._save_errors[row.step] = row.error
            self._saved.notify_all()

    def _learn(self, *, wait: bool) -> None:
        """Take in the id of a new run as soon as it has one; ReusedError where a finished one stands for it."""
        if self._asked_run is None or not (wait or ray.wait([self._asked_run], timeout=0)[0]):
            return
        run_id = ray.get(self._asked_run)
        self._asked_run = None
        if run_id is None:
            raise ReusedError
        assert self.on_run_id is not None
        self.on_run_id(run_id)


class Peer:
    """Another rank of a trial, in a process that stays for the trials that follow."""

    def __init__(self, folder: str) -> None:
        if folder not in sys.path:
            sys.path.insert(0, folder)

    def train(self, spec: Spec, origin: Origin, host: str, port: int, rank: int, size: int) -> None:
        """Train as this rank. What the job raises comes back as it is told on one line."""
        try:
            store = TCPStore(host, port, size, is_master=False)
            with joined(store, rank, size):
                fit(spec, load_job(spec.job.use, spec.job.params), Group.join(device()), NoRecord(), origin)
        except Exception as error:
            known = error if isinstance(error, LockstepError) else told(error, f"rank {rank}")
            raise type(known)(str(known)) from error


def start_peers(spec: Spec, folder: str) -> list[Any]:
    """The other ranks of this actor's trials, in its placement group."""
    group = ray.util.get_current_placement_group()
    bundles = group.bundle_specs if group is not None else []
    return [
        ray.remote(Peer)
        .options(
            num_cpus=bundles[rank]["CPU"],
            num_gpus=bundles[rank].get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        )
        .remote(folder)
        for rank in range(1, spec.workers.min)
    ]


@contextmanager
def joined(store: Any, rank: int, size: int) -> Iterator[None]:
    """The process group of a trial, ended on the way out."""
    backend = "nccl" if device().type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def device() -> torch.device:
    """What Ray gave this process."""
    return torch.device("cuda", 0) if ray.get_gpu_ids() else torch.device("cpu")


def first_cause(others: list[Any], error: Exception) -> Exception:
    """The error that another rank ended with, where rank 0 has only lost it."""
    if not isinstance(error, ClusterError) and not isinstance(told(error, "rank 0"), ClusterError):
        return error
    for done in ray.wait(others, num_returns=len(others), timeout=10.0)[0]:
        try:
            ray.get(done)
        except ray.exceptions.RayTaskError as failure:
            if isinstance(failure.cause, LockstepError) and not isinstance(failure.cause, ClusterError):
                return failure.cause
        except ray.exceptions.RayError:
            continue  # it is gone: that is what rank 0 says
    return error


class WorkersLostError(RuntimeError):
    """A worker of the trial is gone; the trial goes on in another attempt."""


class LeftError(BaseException):
    """Tune wants no more of this trial."""


class ReusedError(BaseException):
    """A finished run has this identity."""


def run_name(sweep_id: str, number: int, spec: Spec) -> str:
    """The name under which any attempt of a trial finds its run; in a population a trial goes through several."""
    document = {key: value for key, value in spec.document().items() if key not in PLACEMENT}
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return f"sweep-{sweep_id}-{number}-{digest[:16]}"
