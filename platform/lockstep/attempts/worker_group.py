"""One attempt's group of workers, which Ray Train starts and watches, and the reasons why it ended."""

from __future__ import annotations

import re
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.attempts import problems
from lockstep.attempts.joining_workers import JoiningWorkerPlace, JoiningWorkers
from lockstep.attempts.mailbox import ANSWER_S, LOST
from lockstep.attempts.placement import WorkerPlacement, anywhere_but, nodes_for
from lockstep.attempts.preloaded_modules import AHEAD
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.clusters.background import in_background
from lockstep.clusters.bounded_calls import answer_of
from lockstep.clusters.ray_internals.fork_server import preloading
from lockstep.communication.credentials import Secret
from lockstep.driver.start_stages import StageEnds
from lockstep.errors import ClusterError, LockstepError, first_line
from lockstep.record.events.union import Joined
from lockstep.running_time import wait_for
from lockstep.spec.fields import Spec

END_S = 150.0
"""How long Ray may take to end an attempt's workers and report it; it looks only once a minute at a placement that it waits for."""


class WorkerGroup:
    """One start of the worker group, in a thread: Ray Train's `fit` blocks, and would handle signals in the main thread."""

    def __init__(
        self,
        spec: Spec,
        origin: AttemptOrigin,
        mailbox: Any,
        placement: WorkerPlacement,
        environment: Mapping[str, str],
        shown_as: str,
        source: Mapping[str, bytes] | None = None,
    ) -> None:
        """`shown_as` is the same for all attempts that Ray's dashboard should show as one run."""
        self.over = threading.Event()
        self.error: LockstepError | None = None
        self.names_lost = False
        """Whether `error` says which workers' processes are gone: then what others met of that is a consequence."""
        self.stage_ends = StageEnds()
        self.lost: dict[int, ClusterError] = {}
        """Why lost workers are gone although the others go on, by their numbers at rendezvous: a worker's first rank, or a joining worker's number."""
        self.can_regroup = True
        """Whether Ray Train's group allows its workers to go on in another group."""
        self.replaced_by_ray = False
        """Whether Ray starts another worker in the place of a lost one, which waits to be let in."""
        self.origin = origin
        self.run_id = origin.run_id
        """The run's id, once it is known."""
        self._shown_as = shown_as
        self._spec, self._mailbox = spec, mailbox
        self._trainer: Any = None
        self._started = self._given_up = False
        self._config = {
            "spec": spec.document(),
            "origin": origin,
            "mailbox": mailbox,
            "folder": str(Path.cwd()),
            "source": source,
            "secret": Secret(),
        }
        self._placement = placement
        self._environment = environment
        self.joining_workers = JoiningWorkers(self._config, self._joining_worker_lost)
        self._inside: frozenset[int] = frozenset()

    def start(self) -> None:
        self._started = True
        in_background(self._fit, name="lockstep-attempt")

    def end(self) -> None:
        """End its workers, and wait until Ray confirms it. ClusterError where Ray does not. Nothing to do if it was not started."""
        if not self._started:
            return
        self.joining_workers.end()
        if self._trainer is not None:
            self._trainer.end_workers()
        if not wait_for(self.over.wait, END_S):
            raise problems.STILL_THERE(attempt=self.origin.attempt, seconds=f"{END_S:.0f}")

    def give_up(self) -> None:
        """Let the attempt end with its lost workers, although the others were to go on."""
        self._given_up = True

    @property
    def each(self) -> dict[str, float]:
        """The resources of one worker."""
        return self._placement.each

    def let_in(self, numbers: Collection[int]) -> None:
        """Note the numbers of the workers in the group that now trains."""
        self._inside = frozenset(numbers)

    def vacant(self, everyone: Mapping[int, Joined]) -> dict[int, str]:
        """The places of lost workers that Ray Train's placement group keeps: the node of each, by the index of its bundle."""
        _, bundles = self._bundles()
        occupied = {self.joining_workers.places[number].bundle for number in self.joining_workers.living()}
        return {
            bundles[rank]: everyone[rank].node
            for rank in sorted(bundles.keys() & self.lost.keys() & everyone.keys())
            if bundles[rank] not in occupied
        }

    def start_joining_workers(
        self,
        places: Sequence[JoiningWorkerPlace],
        everyone: Mapping[int, Joined],
        table_versions: Mapping[str, str],
    ) -> tuple[int, ...]:
        """Start a joining worker at each of these places. Returns their numbers. `everyone` are all workers so far, of whom at least one lives.

        `table_versions` are those in which the others read tables that change.
        """
        self._config["origin"] = replace(self.origin, table_versions=table_versions)
        first = 1 + max([*everyone, *self.joining_workers.places, self._placement.workers - 1])
        nodes = list(dict.fromkeys(worker.node for worker in everyone.values()))
        new = [node for node in dict.fromkeys(location.node for location in places) if node not in nodes]
        names = {node: f"node-{len(nodes) + i}" for i, node in enumerate(new)}
        numbered = dict(enumerate(places, first))
        runtime_env = next(iter(everyone.values())).runtime_env
        self.joining_workers.start(numbered, self._placement.each, runtime_env, self._bundles()[0], names)
        return tuple(numbered)

    def _bundles(self) -> tuple[Any, dict[int, int]]:
        return self._trainer.bundles() if self._trainer is not None else (None, {})

    def dismiss(self, numbers: Sequence[int]) -> None:
        """Kill these joining workers. The mailbox hears of it: one that had come to a rendezvous is not to be waited for."""
        self.joining_workers.end(numbers)
        for number in numbers:
            self._joining_worker_lost(number, "it was no longer needed")

    def _joining_worker_lost(self, number: int, text: str) -> bool:
        """Whether the others go on without a worker that had joined, or was to. Called in a thread of its own, or in the driver's."""
        inside = number in self._inside
        if inside:
            self.lost[number] = problems.JOINED_LOST(worker=number, got=why_lost(text))
        else:
            self.joining_workers.failed[number] = why_lost(text)
        with suppress(*LOST):  # without the mailbox no worker can go on
            goes_on: bool = answer_of(self._mailbox.lose.remote(number), "the run's mailbox", ANSWER_S)
            return goes_on
        return False

    def _others(self) -> bool:
        """Whether joining workers train. Called in the thread of Ray's controller, at each look."""
        return bool(self._inside & self.joining_workers.living()) and not self._given_up

    def _outlived(self, lost: Mapping[int, str]) -> bool:
        """Whether the other workers go on without these. Called in the thread of Ray's controller, at each look."""
        for rank in sorted(lost.keys() - self.lost.keys()):
            if self._inside and rank not in self._inside:  # it had already left the run
                continue
            self.lost[rank] = problems.RANK_LOST(
                rank=rank, workers=self._placement.workers, got=why_lost(lost[rank])
            )
            try:
                goes_on: bool = answer_of(self._mailbox.lose.remote(rank), "the run's mailbox", ANSWER_S)
            except LOST:  # without the mailbox no worker can
                goes_on = False
            if not goes_on:
                del self.lost[rank]
                return False
        return not self._given_up

    def _replica_lost(self, number: int, text: str) -> bool:
        """Whether the others go on without a worker that Ray's public trainer has started. Called in the thread of the attempt."""
        if number >= self._placement.workers:
            goes_on = self._joining_worker_lost(number, text) and not self._given_up
        else:
            goes_on = self._outlived({number: text})
        if not goes_on and self.error is None:
            self.error = problems.RANK_LOST(rank=number, workers=self._placement.workers, got=text)
        return goes_on

    def _fit(self) -> None:
        self.stage_ends.at["decision"] = time.time()
        try:
            with tempfile.TemporaryDirectory(
                prefix="lockstep-ray-train-", ignore_cleanup_errors=True
            ) as storage:
                self._trainer = self._make_trainer(storage)
                self._trainer.fit()
        except Exception as error:  # noqa: BLE001 - the driver reports whatever ended the attempt
            self.names_lost = self.error is None and names_lost(error)
            self.error = self.error or ended_by(error, self._placement.workers)
        finally:
            if self.error is None and self.lost:
                lost = [self.lost[number] for number in sorted(self.lost)]
                self.error = (
                    lost[0] if len(lost) == 1 else problems.SEVERAL_LOST(got="; ".join(map(str, lost)))
                )
            self.joining_workers.end()
            self.stage_ends.note("teardown")
            self.over.set()

    def _make_trainer(self, storage: str) -> Any:
        """Ray Train for this attempt, with its controller in this process if Ray's private parts allow it."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig

        from lockstep.attempts.process_group import AuthenticatedTorch
        from lockstep.clusters.ray_internals import unavailable

        placement, gpu = self._placement, "GPU" in self._placement.each
        scaling = {
            "num_workers": placement.workers,
            "use_gpu": gpu,
            "resources_per_worker": placement.each,
            "label_selector": anywhere_but(placement.unfit),
        }
        torch_config = AuthenticatedTorch("nccl" if gpu else "gloo", secret=self._config["secret"])
        run = {
            "name": f"lockstep-{uuid.uuid4().hex[:12]}",  # Ray would resume a name that it has seen
            "storage_path": storage,
            "failure_config": FailureConfig(max_failures=0),
            "worker_runtime_env": {"env_vars": {**self._environment, **preloading(AHEAD)}},
        }
        if unavailable("driver trainer"):
            from lockstep.attempts.public_trainer import PublicTrainer, ReplacingTrainer

            self.can_regroup = self.replaced_by_ray = not gpu
            if not gpu:
                return ReplacingTrainer(
                    self._config, self._replica_lost, scaling_config=ScalingConfig(**scaling), run=run
                )
            return PublicTrainer(
                self._config,
                scaling_config=ScalingConfig(**scaling),
                torch_config=torch_config,
                run_config=RunConfig(**run),
            )
        from lockstep.attempts.worker_main import worker_main
        from lockstep.clusters.ray_internals.chosen_nodes import ChosenNodes
        from lockstep.clusters.ray_internals.driver_trainer import DriverTrainer
        from lockstep.clusters.ray_internals.losses import Losses
        from lockstep.clusters.ray_internals.stage_times import StageTimes
        from lockstep.clusters.ray_internals.train_page import Shown

        return DriverTrainer(
            worker_main,
            train_loop_config=self._config,
            scaling_config=ChosenNodes(**scaling, choose=partial(nodes_for, placement)),
            torch_config=torch_config,
            run_config=RunConfig(
                **run,
                callbacks=[StageTimes(self.stage_ends.note), Losses(self._outlived, self._others)],
            ),
            shown=Shown(self._shown_as, self._spec.name, lambda: self.run_id, self._mailbox),
        )


def ended_by(error: BaseException, workers: int) -> ClusterError:
    """Why Ray ended an attempt: which ranks were lost and why, if Ray says so."""
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    if not failures:
        failed: BaseException = getattr(
            error, "controller_failure", error
        )  # Ray's own words for it say no more
        if _ACTOR_LOST.search(text := f"{failed}\n{failed.__cause__}"):
            return problems.LOST_AT_START(workers=workers, got=why_lost(text))
        return problems.ATTEMPT_ENDED(workers=workers, got=_telling_line(failed))
    # Whoever met the loss of another in a call of its own has failed as well, and is not the cause.
    died = {rank: failure for rank, failure in failures.items() if has_died(failure)}
    failures = died or failures
    ranks = ", ".join(str(rank) for rank in sorted(failures))
    text = " ".join(str(failure) for failure in failures.values())
    if of_memory(text):
        return problems.NODE_MEMORY(rank=ranks, workers=workers)
    return problems.RANK_LOST(rank=ranks, workers=workers, got=why_lost(text))


def _telling_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message; where that line only announces others, with the last of those."""
    line = first_line(error)
    lines = [text.strip() for text in f"{error}\n{error.__cause__ or ''}".splitlines() if text.strip()]
    return f"{line} {lines[-1]}" if line.endswith(":") and len(lines) > 1 else line


_ANNOUNCED = "A worker health check failed."
"""Ray's first line where a worker does not answer; what it knows of that follows."""

_ACTOR_LOST = re.compile(r"The actor (?:died|is dead|\w+ is unavailable)|Worker exit detail: ")


def has_died(failure: BaseException) -> bool:
    """Whether Ray's error of a worker says that its process is gone, rather than what its function raised."""
    text = f"{failure}\n{getattr(failure, 'health_check_failure', '')}"
    return of_memory(text) or _ACTOR_LOST.search(text) is not None


def names_lost(error: BaseException) -> bool:
    """Whether Ray's error of an attempt says of some worker that its process is gone."""
    return any(has_died(failure) for failure in getattr(error, "worker_failures", {}).values())


def of_memory(text: str) -> bool:
    """Whether Ray says that its memory monitor killed a process."""
    return "OutOfMemory" in text or "low on memory" in text


def why_lost(text: str) -> str:
    """Why a process is gone, in one line, as far as Ray knows."""
    if of_memory(text):
        return "it was killed: its node ran out of memory"
    match = re.search(r"Worker exit detail:[ \t]*(\S.*)", text)
    if match is None:
        because = re.search(r"The actor (?:died|is dead) because (?:of )?(\S.*)", text)
        if because is not None:
            return because[1].partition(" Worker exit type:")[0].strip().rstrip(".") or "no message"
        unavailable = re.search(r"The actor \w+ is unavailable: (\S.*?)\.?(?: The task may|$)", text, re.M)
        if unavailable is not None:
            return f"its process cannot be reached ({unavailable[1]})"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return next((line for line in lines if line != _ANNOUNCED), "no message")
    detail = match[1].strip()
    if (
        "connection error code 2" in detail
    ):  # the process ended without a message; what Ray says after the first full stop is a guess
        return (
            f"{detail.partition('.')[0]}: it was killed from outside or crashed; where the kernel's out-of-memory killer did "
            "it, dmesg on its node says so"
        )
    return detail.rstrip(".")
