"""The mailbox of a run: a small actor between the workers of its attempts, its driver and its recorder.

Workers leave events in it and are answered with what is asked of them; the driver looks at it. The recorder fetches the
events when it can, and the mailbox keeps each until the recorder says that it is in the journal: a recorder that is lost or
hangs costs no event and ends no attempt. Nothing here waits or touches a disk.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import ray

from lockstep.attempts import problems
from lockstep.clusters.bounded_calls import answer_of, unanswered
from lockstep.driver.run_view import RunView
from lockstep.errors import DeviceError, RecordError, SilentError
from lockstep.record.events.union import (
    Broke,
    Event,
    Failed,
    Finished,
    Joined,
    StageEnded,
    Started,
    TakenOver,
)
from lockstep.record.recorder_state import RecorderState
from lockstep.running_time import running_s
from lockstep.training.elastic.membership import Answer, Arrival, RendezvousRounds

EVENTS_PER_FETCH = 10_000
"""The most events that the recorder is given at once."""

BEGUN = (Started, Finished, Failed)
"""With the first of these events a run is created, and its workers wait for that."""

LOST = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError, SilentError)
"""What a call raises where an actor's process is gone, or does not answer any more."""

MOST_REPLACED = 1000
"""How many workers Ray's public trainer may have started in one attempt: one that dies at each start would be started for ever."""

ANSWER_S = 60.0
"""How long the mailbox may take to answer: nothing that it does waits for anything."""

LOOK_S, STEADY_LOOK_S = 0.3, 1.0
"""How often the driver and the recorder look into the mailbox, at first and later: a look takes 4 ms of a processor from the workers, on both sides together."""

NAMED_S = 900.0
"""How long workers wait for the run: its recorder may take minutes to start, and the driver replaces one that hangs."""


class Asked(NamedTuple):
    """What the driver asks of the workers of the attempt at hand."""

    stop: bool = False
    saves: int = 0
    """How many checkpoints it has asked for in this attempt."""
    regroup: int = 0
    """The attempt whose workers are to form another group after their next step."""


class WentOn(NamedTuple):
    """How an attempt began whose workers go on in memory."""

    at: float
    """When they had all come, in Unix seconds."""
    step: int
    """The step from which they go on."""
    workers: int
    left: Sequence[RunView]
    """What was seen of each attempt that these workers have left in memory because a device or a micro-batch failed, in order."""
    joined: int = 0
    """How many of them were handed the state."""


class RunStatus(NamedTuple):
    """What the driver asks for while a run goes on."""

    view: RunView
    recorder: RecorderState
    mailbox: int
    """The process id of the mailbox, on the driver's node."""
    went_on: WentOn | None = None
    """Of the attempt at hand, where it began so."""
    numbers: tuple[int, ...] = ()
    """The workers of the attempt at hand by rank, each by the number."""
    waiting: tuple[int, ...] = ()
    """The joining workers that are ready, and wait to be let in."""
    able: bool = False
    """Whether the workers could form another group in their processes."""
    everyone: Mapping[int, Joined] = {}
    """All that worked since the driver last began an attempt, or are to, by their numbers."""
    fetches: int = 0
    """How often events were fetched: it grows as long as the recorder works."""


class TrainerSlot(NamedTuple):
    """What a worker that Ray's public trainer starts is to be."""

    number: int | None
    """Its rank for the first worker of this rank, another number for one that comes in its place; None where the attempt is over."""
    table_versions: Mapping[str, str] = {}
    """Those in which the others read tables that change, for one that joins."""


class TrainerSlots(NamedTuple):
    """The workers that Ray's public trainer has started in an attempt."""

    references: Mapping[int, list[Any]]
    """By number, a reference that fails when the worker's process has ended, in a list."""
    ended: frozenset[int]
    """The numbers of those that have ended by themselves."""


class Fetched(NamedTuple):
    """Events for the recorder, the number of the last one, and whether nothing comes after them."""

    events: list[Event]
    last: int
    closed: bool


class Mailbox:
    """The actor's methods are carried out in the order in which they were called."""

    def __init__(self) -> None:
        self._view = RunView(attempt=0)
        self._asked = Asked()
        self._kept: deque[tuple[int, Event]] = deque()
        """Events that are not in the journal yet, each with its number."""
        self._last = 0
        self._recorder = RecorderState()
        self._closed = False
        self._named = False
        self._calls = RendezvousRounds(0, 0)
        self._first = 0
        """The attempt that the driver began last; from it the workers may have gone on to others."""
        self._by_number: dict[int, Joined] = {}
        """Its workers and joining workers, by the numbers."""
        self._numbers: tuple[int, ...] = ()
        self._fetches = 0
        self._call: Callable[[], object] = lambda: None
        """Has the recorder look at once."""
        self._went_on: WentOn | None = None
        self._references: dict[int, list[Any]] = {}
        """By the number that it was given, what each worker of Ray's public trainer hangs on."""
        self._ended: set[int] = set()
        """The numbers of those that have ended by themselves."""
        self._address: tuple[str, int] | None = None
        self._early: list[Callable[[], object]] = []
        """Calls of workers that came before the driver's call which begins the first attempt."""

    # --- for workers ------------------------------------------------------------------------------------------

    def tell(self, attempt: int, events: Sequence[Event]) -> Asked:
        """Take events of an attempt. Those of an attempt that was given up are recorded, and not seen.

        Before the driver's first attempt is begun they wait for that: to a mailbox that starts late, calls of several processes come in any
        order. The driver waits for the beginning of every later one.
        """
        if not self._first:
            self._early.append(partial(self.tell, attempt, events))
            return self._asked
        for reported in events:
            event = reported
            if isinstance(reported, Broke) and attempt == self._view.attempt:
                if not isinstance(reported.error, DeviceError):  # its process ends, and the others go on
                    self._calls.end(reported.rank)
                event = replace(reported, rank=self._rank_of(reported.rank))
            if attempt == self._view.attempt:
                self._view.take(event)
            if isinstance(event, Joined) and attempt == self._first:
                self._by_number[event.rank] = event
            if isinstance(event, Finished) and attempt == self._view.attempt:
                self._calls.refuse("the run has ended")
            # How the attempt ended is the run's end only if the driver says so.
            if not isinstance(event, Finished | Broke | Joined | StageEnded):
                self._keep(event)
        return self._asked

    def run_id(self) -> str | RecordError | None:
        """The run's id; what went wrong where it will have none, and None as long as it may come."""
        return self._recorder.run_id or self._recorder.failure

    def named(self) -> bool | RecordError:
        """Whether the driver has told the run's id; what went wrong where it will have none."""
        return self._named or self._recorder.failure or False

    # --- for workers that Ray's public trainer starts: see replica_worker --------------------------------------

    def take_slot(self, attempt: int, rank: int, reference: list[Any]) -> TrainerSlot | None:
        """What a worker of this rank in Ray's view is to be; None before the driver has begun the attempt.

        It lives as long as the `reference`, in a list, does not fail.
        """
        if attempt > self._first:
            return None
        if attempt < self._first:
            return TrainerSlot(None)
        if rank not in self._references:
            self._references[rank] = reference
            return TrainerSlot(rank)
        if not self._calls.able or len(self._references) > MOST_REPLACED:
            return TrainerSlot(None)
        number = 1 + max([*self._references, *self._numbers])
        self._references[number] = reference
        return TrainerSlot(number, self._view.table_versions)

    def leave_slot(self, attempt: int, number: int) -> None:
        """The worker with this number has ended by itself."""
        if attempt == self._first:
            self._ended.add(number)

    def meet_at(self, attempt: int, address: tuple[str, int]) -> None:
        """Rank 0 serves the rendezvous of the first workers there."""
        if attempt == self._first:
            self._address = address

    def rendezvous_address(self, attempt: int) -> tuple[str, int] | None:
        """Where the first workers meet, once it is known."""
        return self._address if attempt == self._first else None

    # --- rendezvous: see training.rendezvous -------------------------------------------------------------------

    def ready(self, attempt: int, worker: int) -> None:
        """A worker of the attempt that has this number in the driver trains, and would come to a rendezvous."""
        if not self._first:
            self._early.append(partial(self.ready, attempt, worker))
        elif attempt == self._first:
            self._calls.ready(worker)

    def enter(self, attempt: int, worker: Joined, arrival: Arrival) -> None:
        """A joining worker is ready; its rank is the number that the driver gave it for the attempt that has this number there."""
        if attempt == self._first:
            self._by_number[worker.rank] = worker
            self._calls.enter(worker.rank, arrival)

    def arrive(self, attempt: int, worker: int, arrival: Arrival) -> None:
        """A worker has left its step and waits."""
        self._calls.arrive(attempt, worker, arrival)
        self._follow()

    def ask(self, attempt: int | None, worker: int) -> Answer:
        """What a worker that waits is told; a joining worker knows no attempt."""
        return self._calls.ask(attempt, worker)

    def called(self) -> int | None:
        """The attempt whose workers are to come to a rendezvous, where there is one."""
        return self._calls.called

    def lose(self, worker: int) -> bool:
        """Ray has lost a worker's process. Whether the others go on without it."""
        goes_on = self._calls.lose(worker)
        self._follow()
        return goes_on

    def refuse(self, why: str) -> None:
        """Nobody goes on: the driver ends the attempt."""
        self._calls.refuse(why)

    def _rank_of(self, worker: int) -> int:
        """The rank in the attempt at hand of a worker that tells of itself by its number."""
        return self._calls.workers.index(worker) if worker in self._calls.workers else worker

    def _follow(self) -> None:
        """See the attempt that the rendezvous has begun, where it has."""
        formation = self._calls.newest
        if formation is not None and formation.attempt > self._view.attempt:
            left, numbers = self._view, self._numbers
            left.members = self._by_number
            self._view = left.gone_on(formation.attempt, formation.workers)
            left.members = {rank: left.members[n] for rank, n in enumerate(numbers) if n in left.members}
            joined = len(set(formation.workers) - set(self._numbers))
            self._numbers = formation.workers
            failed = [] if self._went_on is None else [*self._went_on.left]
            if left.device_ranks or left.broken:
                failed.append(left)
            self._went_on = WentOn(
                time.time(), formation.progress.step, len(formation.workers), failed, joined
            )

    # --- for the driver ---------------------------------------------------------------------------------------

    def name(self) -> None:
        """The run's id is told: its steps may begin."""
        self._named = True

    def begin(self, attempt: int, workers: int = 1, fewest: int = 1) -> None:
        """Another attempt begins, with so many workers; where not even the `fewest` are left, they do not go on."""
        self._view, self._asked = self._view.next(attempt), Asked()
        self._calls, self._first = RendezvousRounds(attempt, workers, fewest), attempt
        self._numbers = self._calls.workers
        self._by_number, self._went_on = {}, None
        self._ended, self._references, self._address = set(), {}, None
        early, self._early = self._early, []
        for call in early:
            call()

    def slots(self, attempt: int) -> TrainerSlots:
        """The workers that Ray's public trainer has started in the attempt."""
        if attempt != self._first:
            return TrainerSlots({}, frozenset())
        return TrainerSlots(dict(self._references), frozenset(self._ended))

    def status(self) -> RunStatus:
        """How the attempt at hand stands. Never waits."""
        calls = self._calls
        return RunStatus(
            self._view,
            self._recorder,
            os.getpid(),
            self._went_on,
            calls.workers,
            calls.waiting,
            calls.able,
            dict(self._by_number),
            self._fetches,
        )

    def ask_stop(self) -> None:
        """Ask the workers to end the attempt after their next step."""
        self._asked = self._asked._replace(stop=True)

    def ask_regroup(self, leaving: Collection[int]) -> bool:
        """Ask the workers to form another group after their next step, with the joining workers that wait and without those in `leaving`.

        Whether they do.
        """
        attempt = self._calls.plan(leaving)
        if attempt is not None:
            self._asked = self._asked._replace(regroup=attempt)
        return attempt is not None

    def ask_save(self) -> None:
        """Ask the workers for a checkpoint after their next step; the attempt goes on."""
        self._asked = self._asked._replace(saves=self._asked.saves + 1)

    def record(self, events: Sequence[Event]) -> None:
        """Have the driver's own events recorded."""
        for event in events:
            self._keep(event)

    def close(self) -> None:
        """Nothing more will be told."""
        self._closed = True

    # --- for the recorder -------------------------------------------------------------------------------------

    def fetch(self, done: int, sent: int, state: RecorderState) -> Fetched:
        """Events from number `sent` + 1 on; those up to number `done` are in the journal, and forgotten."""
        self._recorder, self._fetches = state, self._fetches + 1
        # The run's end is kept until its recorder is done with it: another one would have to write it once more.
        while (
            self._kept
            and self._kept[0][0] <= done
            and not isinstance(self._kept[0][1], Finished | Failed | TakenOver)
        ):
            self._kept.popleft()
        events: list[Event] = []
        last = sent
        for number, event in self._kept:
            if number > sent and len(events) < EVENTS_PER_FETCH:
                events.append(event)
                last = number
        has_more = bool(self._kept) and self._kept[-1][0] > last
        return Fetched(events, last, self._closed and not has_more)

    def recorded_by(self, recorder: Any) -> None:
        """From now on this recorder fetches the events, and is called when a run begins: by itself it looks now and then."""
        self._call = recorder.look.remote

    def _keep(self, event: Event) -> None:
        self._last += 1
        self._kept.append((self._last, event))
        if isinstance(event, BEGUN):
            self._call()


class MailboxRendezvousClient:
    """One worker's way to the rendezvous of the mailbox (`training.elastic.rendezvous.RendezvousClient`)."""

    def __init__(self, mailbox: Any, attempt: int, worker: int, joining_worker: Joined | None = None) -> None:
        self._mailbox, self._first, self._worker = mailbox, attempt, worker
        self._joining_worker = joining_worker

    def ready(self) -> None:
        self._mailbox.ready.remote(self._first, self._worker)

    def arrive(self, attempt: int, arrival: Arrival) -> None:
        self._answer(self._mailbox.arrive.remote(attempt, self._worker, arrival))

    def enter(self, arrival: Arrival) -> None:
        self._answer(self._mailbox.enter.remote(self._first, self._joining_worker, arrival))

    def ask(self, attempt: int | None) -> Answer:
        answer: Answer = self._answer(self._mailbox.ask.remote(attempt, self._worker))
        return answer

    def called(self) -> int | None:
        try:
            called: int | None = self._answer(self._mailbox.called.remote())
        except ray.exceptions.ActorUnavailableError as error:
            raise problems.MAILBOX_UNREACHABLE() from error
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError):
            # Without the mailbox the attempt ends anyway.
            return None
        return called

    def _answer(self, asked: Any) -> Any:
        return answer_of(asked, "the run's mailbox", ANSWER_S)


def look_every_s(begun_at: float | None) -> float:
    """How often to look into the mailbox where what is looked at began at this Unix time; None where it has not.

    At first a person waits for the next line. A tenth of the time that it lasts already is later soon enough, up to STEADY_LOOK_S.
    """
    lasts_s = 0.0 if begun_at is None else time.time() - begun_at
    return min(max(LOOK_S, lasts_s / 10), STEADY_LOOK_S)


def start_mailbox(environment: dict[str, str]) -> Any:
    """A mailbox on this node; it takes no CPU from the workers."""
    return on_this_node(Mailbox, environment).remote()


def on_this_node(kind: type, environment: dict[str, str], **settings: Any) -> Any:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    options: dict[str, Any] = {"scheduling_strategy": strategy}
    if environment:
        options["runtime_env"] = {"env_vars": environment}
    return ray.remote(num_cpus=0, **settings)(kind).options(**options)


def wait_until_named(mailbox: Any) -> None:
    """Wait until the driver has reported the run's id. RecordError where the store could not be opened; SilentError after NAMED_S."""
    _answer(mailbox.named, "the driver, which should have reported the run's id,")


def wait_for_run_id(mailbox: Any) -> str:
    """Wait until the run exists; its id. RecordError where the store could not be opened; SilentError after NAMED_S."""
    return str(_answer(mailbox.run_id, "the recorder, which should have created the run,"))


def _answer(ask: Any, whose: str) -> Any:
    """Ask until there is an answer."""
    until = running_s() + NAMED_S
    while not (answer := answer_of(ask.remote(), "the run's mailbox", ANSWER_S)):
        if running_s() > until:
            raise unanswered(whose, NAMED_S)
        time.sleep(0.05)
    if isinstance(answer, RecordError):
        raise answer
    return answer
