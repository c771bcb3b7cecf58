"""Runs that lose workers: processes of their own, a rendezvous in the test's, and a worker that kills itself at a chosen place.

A place is a name and how often it was passed. The names are the calls in which a rank waits for others, or leaves something that
others wait for; where they lie in a step is for the tests to say.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
import lockstep.checkpoint.saver
import lockstep.checkpoint.snapshot
import lockstep.communication.group
import lockstep.training.elastic.recovery
import lockstep.training.loop
import lockstep.training.run_facts
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.checkpoint.tree_decoder import unpack
from lockstep.communication.communicator_abort import KernelWaits
from lockstep.communication.credentials import Secret
from lockstep.communication.group import Group
from lockstep.communication.links import _Link
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, Restored, tell_nobody
from lockstep.record.ledger.history import History
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.record.ledger.tables import DETERMINISTIC
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.elastic.membership import RendezvousRounds
from lockstep.training.elastic.recovery import Seat, next_attempt
from lockstep.training.elastic.rendezvous import RendezvousHandler
from lockstep.training.integrity.agreement import Agreement
from lockstep.training.loop import fit, join
from lockstep.training.state import TrainState
from lockstep.training.step.buffers import StepBuffers
from lockstep.training.step.forward_backward import ForwardBackward
from lockstep.training.step.mirrored_optimizer import MirroredOptimizer
from lockstep.training.step.mirrored_shards import MirroredShards, _Exchange
from lockstep.training.step.optimizer_step import Stepper
from lockstep.training.step.reduction import _Piece
from lockstep.training.step.sharding import FullyShardedOptimizer
from lockstep.training.step.shards import Shard
from lockstep.training.step.span_gathering import SpanGathering
from tests.distributed.flipped_jobs import flip
from tests.distributed.kernels import NAME as KERNELS
from tests.distributed.kernels import register
from tests.distributed.small_jobs import Plain, points
from tests.distributed.training import Document, bits, digested
from tests.forked import forking

ANSWER_S = 120
TOLD_AT_ONCE = 3
"""Rows that a worker keeps before it sends them: those that it has not sent are lost with it."""


class Fall(NamedTuple):
    """Worker number `worker` kills itself in step `step` (counted from 1), when it comes to `place` for the `count`-th time in it.

    One that falls `silent` stops and keeps its connections, as a machine that is gone seems to do; its loss is told from outside.
    With `after`, a thread that writes falls only once training has come to the end of that step.
    """

    worker: int
    step: int
    place: str
    count: int = 1
    silent: bool = False
    after: int = 0


class Change(NamedTuple):
    """After step `step` so many joining workers are let in, and the workers in `leaving` leave. The step is done once all joining workers are ready."""

    step: int
    joining: int = 0
    leaving: tuple[int, ...] = ()


class JoiningWorker(NamedTuple):
    """In what the joining workers are other than the first workers."""

    path: str = ""
    """Where they import the job from."""
    environment: Mapping[str, str] = {}
    probe: str = ""
    """What the numerics probe gives there, as on another processor."""
    table_versions: Mapping[str, str] = {}
    """In which versions they read tables that change."""


ALIKE = JoiningWorker()


class Outlived(NamedTuple):
    """What a run came to whose workers fell."""

    summaries: dict[int, dict[str, Any]]
    """Of each worker that was left, by its number."""
    rows: tuple[Any, ...]
    evaluations: tuple[Any, ...]
    """What was told, in order of steps: a step that was told twice had the same bits."""
    attempts: int
    begun: dict[int, list[int]]
    """By worker: the steps that it began."""
    places: dict[int, list[tuple[int, str]]]
    """By worker: the places that it passed, each with its step."""
    pids: dict[int, int]
    """Of each worker that was left."""
    ended: tuple[float, ...]
    """When each step was done, in Unix seconds."""


class Told:
    """What a run's record would hold: each step once, and the same whenever it is told."""

    def __init__(self) -> None:
        self.steps: dict[int, Any] = {}
        self.evaluations: dict[int, Any] = {}
        self.ended: dict[int, float] = {}
        """When each step was done."""

    def take(self, event: Event) -> None:
        match event:
            case Restored():
                for row in (*event.steps, *event.evaluations):
                    self.take(row)
            case StepRow():
                self.ended[event.step] = event.wall_clock
                self._put(
                    self.steps, event.step, bits({name: getattr(event, name) for name in DETERMINISTIC})
                )
            case EvaluationRow():
                self._put(self.evaluations, event.step, (event.step, event.epoch, bits(event.metrics)))

    def _put(self, held: dict[int, Any], step: int, value: Any) -> None:
        assert held.setdefault(step, value) == value, f"step {step} gave other bits when it was done again"


def outlive(
    document: Document,
    workers: int,
    falls: Sequence[Fall] = (),
    changes: Sequence[Change] = (),
    *,
    run_id: str = "",
    broken: str = "",
    path: str = "",
    joining_worker: JoiningWorker = ALIKE,
    table_versions: Mapping[str, str] | None = None,
    kernels: bool = False,
) -> Outlived:
    """Train on so many workers, of which some fall or leave while others join; these have the numbers from `workers` on.

    All import the job from `path`, if any, and read tables in `table_versions`, but for what `joining_worker` says. `broken` names a mechanism that is taken away. With `kernels`
    they talk by a backend that waits as NCCL does. Raises what ends a worker.
    """
    context = forking()
    calls, told = RendezvousRounds(1, workers), Told()
    joining_workers = sum(change.joining for change in changes)
    with tempfile.TemporaryDirectory(prefix="lockstep-survivors-") as folder:
        pipes, processes = [], []
        for worker in range(workers + joining_workers):
            here, there = context.Pipe()
            own = [fall for fall in falls if fall.worker == worker]
            other = (
                joining_worker
                if worker >= workers
                else JoiningWorker(path, table_versions=table_versions or {})
            )
            arguments = (
                there,
                digested(document),
                worker,
                workers,
                folder,
                own,
                run_id,
                broken,
                other,
                kernels,
            )
            process = context.Process(target=_live, args=arguments, daemon=False)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            answers = _served(_Coordinator(calls, told, workers, list(changes)), processes, pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()
    errors = [value for value, *_ in answers.values() if isinstance(value, Exception)]
    if errors:
        raise errors[0]
    return Outlived(
        {worker: summary for worker, (summary, *_) in answers.items() if summary is not None},
        tuple(told.steps[step] for step in sorted(told.steps)),
        tuple(told.evaluations[step] for step in sorted(told.evaluations)),
        1 if calls.newest is None else calls.newest.attempt,
        {worker: begun for worker, (_, begun, _) in answers.items()},
        {worker: places for worker, (*_, places) in answers.items()},
        {worker: processes[worker].pid for worker in answers},
        tuple(told.ended[step] for step in sorted(told.ended)),
    )


class _Coordinator:
    """What outlives the workers: the rendezvous, the record, and who is to join and to leave."""

    def __init__(self, calls: RendezvousRounds, told: Told, workers: int, changes: list[Change]) -> None:
        self.calls, self.told, self._changes = calls, told, changes
        self.let_in = workers
        """Workers below this number may enter: the others stay away until it is their turn."""
        self._asked: set[int] = set()
        """The steps after which a change was asked for."""

    def answer(self, worker: int, what: str, *words: Any) -> Any:
        match what:
            case "ready":
                self.calls.ready(worker)
            case "enter":
                self.calls.enter(worker, words[0])
            case "may enter":
                return worker < self.let_in
            case "arrive":
                self.calls.arrive(words[0], worker, words[1])
            case "ask":
                return self.calls.ask(words[0], worker)
            case "called":
                return self.calls.called
            case "regroup":
                return self._regroup(words[0])
            case "told":
                for event in words[0]:
                    self.told.take(event)
        return None

    def _regroup(self, step: int) -> bool | None:
        """Whether the workers regroup after this step; None as long as not all joining workers are ready."""
        change = next((one for one in self._changes if one.step == step), None)
        if change is None:
            return False
        if step not in self._asked:
            self._asked.add(step)
            self.let_in += change.joining
        coming = set(range(self.let_in - change.joining, self.let_in))
        present = set(self.calls.workers)
        if coming <= present and present.isdisjoint(change.leaving):
            return False  # a loss in this step had them join already
        if not coming <= present.union(self.calls.waiting):
            return None
        assert self.calls.plan(change.leaving) is not None
        return True


def _served(
    coordinator: _Coordinator, processes: Sequence[Any], pipes: Sequence[Any]
) -> dict[int, tuple[Any, list[int], list[tuple[int, str]]]]:
    """Keep the rendezvous and the record until every worker has answered or fallen."""
    calls = coordinator.calls
    answers: dict[int, Any] = {}
    spoken, living = dict(enumerate(pipes)), dict(enumerate(processes))
    while min(living, default=coordinator.let_in) < coordinator.let_in:
        ready = wait([*spoken.values(), *(process.sentinel for process in living.values())], timeout=ANSWER_S)
        assert ready, f"workers {sorted(living)} did nothing for {ANSWER_S} s"
        for worker, pipe in list(spoken.items()):
            if pipe not in ready:
                continue
            try:
                what, *rest = pipe.recv()
            except (EOFError, ConnectionResetError):
                del spoken[worker]
                continue
            if what == "answer":
                answers[worker] = tuple(rest)
                calls.end(worker)
                continue
            if what == "silent":
                del spoken[worker], living[worker]
                calls.lose(worker)
            try:
                pipe.send(coordinator.answer(worker, what, *rest))
            except BrokenPipeError:
                spoken.pop(worker)
        for worker, process in list(living.items()):
            if process.sentinel in ready and worker not in spoken:
                del living[worker]
                if worker not in answers:
                    calls.lose(worker)
    return answers


class _Worker(NoRequests):
    """One worker: what it tells, and what it is asked."""

    def __init__(self, pipe: Any, run_id: str) -> None:
        self._pipe, self._run_id, self._reached = pipe, run_id, 0
        self._lock, self._keeping = threading.Lock(), threading.Lock()
        self._kept: list[Event] = []

    def tell(self, event: Event) -> None:
        with self._keeping:  # the thread that saves tells that it is alive
            if isinstance(event, StepRow | EvaluationRow | Restored):
                self._kept.append(event)
            rows = event.steps if isinstance(event, Restored) else (event,)
            self._reached = max((row.step for row in rows if isinstance(row, StepRow)), default=self._reached)
            if not isinstance(event, StepRow) or len(self._kept) >= TOLD_AT_ONCE:
                self._asked("told", self._kept)
                self._kept = []

    def run_id(self) -> str:
        return self._run_id

    def _asked(self, *words: Any) -> Any:
        with self._lock:
            self._pipe.send(words)
            return self._pipe.recv()

    def ready(self) -> None:
        self._asked("ready")

    def regroup(self) -> bool:
        while (answer := self._asked("regroup", self._reached + 1)) is None:
            time.sleep(0.02)
        return bool(answer)

    def enter(self, arrival: Any) -> None:
        while not self._asked("may enter"):
            time.sleep(0.02)
        self._asked("enter", arrival)

    def ask(self, attempt: int | None) -> Any:
        return self._asked("ask", attempt)

    def arrive(self, attempt: int, arrival: Any) -> None:
        self._asked("arrive", attempt, arrival)

    def called(self) -> Any:
        return self._asked("called")

    def fall_silent(self) -> None:
        self._asked("silent")

    def seated(self, group: Group, attempt: int, seat: Seat) -> Seat:
        origin = next_attempt(seat.origin, attempt)
        if group.rank > 0:
            return Seat(group, tell_nobody, NoRequests(), origin)
        return Seat(group, self.tell, self, origin)


def _live(
    pipe: Any,
    document: Document,
    number: int,
    workers: int,
    folder: str,
    falls: Sequence[Fall],
    run_id: str,
    broken: str,
    other: JoiningWorker,
    kernels: bool,
) -> None:
    """A worker's life."""
    if kernels:  # in this process, which ends
        register()
        lockstep.communication.group.backend_of = lambda device: KERNELS
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", **other.environment}
    if other.path:
        sys.path.insert(0, other.path)
    if other.probe:
        lockstep.training.run_facts.numerics_probe = lambda device: other.probe  # type: ignore[assignment]
    places: list[tuple[int, str]] = []
    begun: list[int] = []
    worker = _Worker(pipe, run_id)
    try:
        spec = load_spec(document)
        rendezvous = RendezvousHandler(1, number, "127.0.0.1", Secret(bytes(32)), worker, worker.seated)
        several = mock.patch.object(lockstep.checkpoint.snapshot, "SMALLEST_SHARE", 64)  # each writes a part
        with several, watched(falls, places, begun, worker.fall_silent), _without(broken), rendezvous:
            job = load_job(spec.job.use, spec.job.params)
            cpu = torch.device("cpu")
            origin = AttemptOrigin(table_versions=other.table_versions) if run_id else None
            if number >= workers:
                answer: Any = join(spec, job, cpu, rendezvous, origin)
            else:
                store = dist.FileStore(f"{folder}/store", workers)
                backend = KERNELS if kernels else "gloo"
                dist.init_process_group(backend, store=store, rank=number, world_size=workers)
                seat = worker.seated(
                    Group.join(cpu, outlives=kernels), 1, Seat(None, tell_nobody, worker, origin)
                )  # type: ignore[arg-type]
                answer = fit(spec, job, *seat, rendezvous)
    except Exception as error:  # noqa: BLE001 - carried to the test
        answer = error
    pipe.send(("answer", answer, begun, places))


class Breaking(Plain):
    """Raises for one sample, which one worker alone meets."""

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*points(self.params.samples), torch.arange(self.params.samples))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y, index = batch
        if 40 in index:
            raise ValueError("a sample that breaks")
        return super().loss(model, (x, y))


_PLACES: dict[str, tuple[Any, str]] = {
    "forward": (ForwardBackward, "forward"),
    "send whole": (Group, "swap"),
    "pass on": (Group, "pass_on"),
    "take on": (_Piece, "advance"),
    "send buffers": (Group, "broadcast"),
    "send to one": (_Link, "send"),
    "gather": (Group, "gather"),
    "gather outputs": (Group, "gather_first"),
    "update": (Stepper, "_update"),
    "gather weights": (SpanGathering, "_begun"),
    "take weights": (SpanGathering, "_done"),
    "share out": (MirroredOptimizer, "_exchange"),
    "pass gradients": (MirroredShards, "pass_gradients"),
    "cut anew": (MirroredShards, "_cut_model"),
    "exchange": (_Exchange, "value"),
    "note": (lockstep.training.loop, "note_step"),
    "write": (lockstep.checkpoint.saver, "write_part"),
    "receipt": (lockstep.checkpoint.saver, "post_receipt"),
    "commit": (lockstep.checkpoint.saver, "commit"),
    "agree": (lockstep.training.elastic.recovery, "agree_on_state"),
    "compare states": (lockstep.training.elastic.recovery, "check_same_state"),
}
"""Where a worker may fall: before this is called."""


@contextmanager
def watched(
    falls: Sequence[Fall], places: list[tuple[int, str]], begun: list[int], fall_silent: Callable[[], None]
) -> Iterator[None]:
    """Note which places are passed in which step, and fall where it is said."""

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            # What is saved is written by a thread, while the next steps are taken.
            step = args[1] if name in ("write", "receipt", "commit") else begun[-1] if begun else 0
            places.append((step, name))
            for fall in falls:
                if (fall.step, fall.place) == (step, name) and places.count((step, name)) == fall.count:
                    if fall.after:
                        while begun[-1] < fall.after:
                            time.sleep(0.01)
                        time.sleep(0.5)
                    if fall.silent:
                        fall_silent()
                    os.kill(os.getpid(), signal.SIGSTOP if fall.silent else signal.SIGKILL)
            return function(*args, **more)

        return call

    step = Stepper.__call__

    def begin(self: Stepper, position: Any, *args: Any, **more: Any) -> Any:
        begun.append(position.number)
        return step(self, position, *args, **more)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Stepper, "__call__", begin))
        for name, (owner, attribute) in _PLACES.items():
            function = getattr(owner, attribute)
            stack.enter_context(mock.patch.object(owner, attribute, watched(name, function)))
        yield


@contextmanager
def _without(mechanism: str) -> Iterator[None]:
    """Take away one of the mechanisms that keep the bits."""

    def keep_state(group: Group, *_: Any, **more: Any) -> tuple[int, list[int]]:
        group.gather(None)
        return 0, []

    def nothing(self: History) -> Restored:
        return Restored((), ())

    def abandon(self: Stepper, recorded: int | None = None) -> None:
        with mock.patch.object(StepBuffers, "restore", lambda self: None):
            own(self, recorded)

    def changed(skeleton: Any, tensors: dict[str, Any]) -> Any:
        next(iter(tensors.values())).view(torch.uint8).view(-1)[0] ^= 1
        return unpack(skeleton, tensors)

    def without_optimizer(self: TrainState, sections: Mapping[str, Any], **more: Any) -> None:
        restore(self, {**sections, "optimizer": self.optimizer.state_dict()}, **more)

    def without_start(self: Stepper, recorded: int | None = None) -> None:
        self._start.forget()
        own(self, recorded)

    def behind(self: MirroredOptimizer, closure: None = None) -> None:
        update(self)
        for owner, share in self._shares.items():
            if owner != self.group.rank:
                for i, part in share.parts.items():
                    share.optimizer.state[part.value] |= self._before[owner, i]

    def flipping(self: MirroredOptimizer, parts: Any, optimizer: torch.optim.Optimizer, *more: Any) -> None:
        update_parts(self, parts, optimizer, *more)
        counts = [int(state["step"]) for state in optimizer.state.values()]
        if self.group.rank == 0 and parts is self._parts and counts[:1] == [3]:
            flip(next(part.value for part in parts.values()))

    newest: dict[int, torch.Tensor] = {}

    def rows_behind(self: FullyShardedOptimizer, closure: None = None) -> None:
        rows = [part.value.detach() for part in self._mirrors.values()]
        before = [row.clone() for row in rows]
        for row in rows:
            row.copy_(newest.get(row.data_ptr(), row))
        update_rows(self)
        for row, earlier in zip(rows, before, strict=True):
            newest[row.data_ptr()] = row.clone()
            row.copy_(earlier)

    def changed_rows(self: _Exchange, *arguments: Any) -> Any:
        value = exchanged(self, *arguments)
        if isinstance(value, Shard) and value.local.numel():
            value.local.view(-1)[:1] += 1
        return value

    exchanged = _Exchange.value
    own, restore, update = Stepper.abandon, TrainState.restore, MirroredOptimizer.step
    update_rows, update_parts = FullyShardedOptimizer.step, MirroredOptimizer._updated
    patches = {
        "": (),
        "spans before": (MirroredOptimizer, "take_back", lambda self, step: None),
        "mirror": (MirroredOptimizer, "step", behind),
        "update": (MirroredOptimizer, "_updated", flipping),
        "rows before": (MirroredShards, "take_back", lambda self, step: None),
        "exchanged rows": (_Exchange, "value", changed_rows),
        "mirrored rows": (FullyShardedOptimizer, "step", rows_behind),
        "state on all": (MirroredOptimizer, "_share_with_joining", lambda self, *_: None),
        "agreement": (lockstep.training.elastic.recovery, "agree_on_state", keep_state),
        "history": (History, "retold", nothing),
        "buffers": (Stepper, "abandon", abandon),
        "start of the step": (Stepper, "abandon", without_start),
        "note of kernels": (KernelWaits, "look", lambda self: None),
        "listening": (RendezvousHandler, "_listen", lambda self: None),
        "byte": (lockstep.training.elastic.recovery, "unpack", changed),
        "section": (TrainState, "restore", without_optimizer),
    }
    with ExitStack() as stack:
        if mechanism:
            stack.enter_context(mock.patch.object(*patches[mechanism]))
        if mechanism in ("mirrored rows", "mirror"):  # else the comparisons of each step find it
            stack.enter_context(mock.patch.object(MirroredShards, "balance", return_value=0))
            stack.enter_context(mock.patch.object(Agreement, "_compare_mirrors"))
        if mechanism == "note of kernels":  # else whatever fails by it is the loss of a peer
            stack.enter_context(mock.patch.object(Group, "gives_anything", False))
        if mechanism == "section":  # else the comparison finds it
            stack.enter_context(mock.patch.object(lockstep.training.elastic.recovery, "check_same_state"))
            stack.enter_context(mock.patch.object(Agreement, "compare"))
        yield
