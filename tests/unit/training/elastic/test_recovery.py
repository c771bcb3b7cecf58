"""Which groups outlive the loss of a member, and how their workers come to the next one.

All but those that docs/attempts.md names under "Where it cannot be done". What they do there with real processes is in tests/distributed/test_survivors.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, Replay
from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, Restored, Started, tell_nobody
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.elastic import problems
from lockstep.training.elastic.errors import LeftError, RegroupError
from lockstep.training.elastic.membership import Progress
from lockstep.training.elastic.recovery import (
    Seat,
    agree_on_state,
    can_recover,
    let_in,
    next_attempt,
    regrouped,
    return_to,
    taken_on,
)
from lockstep.training.loop import surroundings
from lockstep.training.setup import prepare
from tests.raised import raises
from tests.unit.record.rows import step_row

PAGE = Path(__file__).parents[4] / "docs" / "attempts.md"
ROOT = Path(__file__).parents[4]

CPU = torch.device("cpu")
PLAIN: Mapping[str, Any] = {"job": {"use": "tests.distributed.small_jobs:Plain"}}
REPLAYED = AttemptOrigin(replay=Replay("a" * 32, "/runs", 0, 3))

KNOWN_BEFORE: dict[str, tuple[Mapping[str, Any], torch.device, AttemptOrigin | None]] = {
    "`sharding: optimizer` or `full` without [`faults.mirror`](#sharded-state)": (
        {"sharding": "full"},
        CPU,
        AttemptOrigin(),
    ),
    "`reduction: native`": ({"reduction": "native"}, CPU, AttemptOrigin()),
    "steps that are taken again to be [compared](verify.md)": ({}, CPU, REPLAYED),
}
"""What is known as a worker begins to train, by the row of the page: the spec, the device and the origin."""

SHOWN_LATER = {
    "a worker that is lost together with its mirror": "tests/distributed/test_mirrors.py",
    "fewer workers are left than `workers.min`, or none": "tests/unit/training/elastic/test_membership.py",
    "a worker ended with an error of its own: the job's, a disk's": "tests/distributed/test_survivors.py",
    "a worker is lost before all of them train": "tests/unit/training/elastic/test_membership.py",
    "a step fails a second time though no worker is lost": "tests/unit/training/elastic/test_membership.py",
    "rank 0 of a [sweep](sweeps.md)'s trial": "tests/cluster/test_sweep.py",
}
"""What shows itself when a worker is lost, and the tests that have it."""


def recovers(spec: Mapping[str, Any], device: torch.device, origin: AttemptOrigin | None) -> bool:
    """Whether a worker of such a run comes to a rendezvous."""
    loaded = load_spec({**PLAIN, "batch": {"global": 8, "micro": 2}, **spec})
    return can_recover(loaded, Group(0, 1, device), origin)


def rows() -> list[str]:
    """The cases of the page's table."""
    section = PAGE.read_text().partition("### Where it cannot be done")[2].partition("\n## ")[0]
    cells = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return cells[2:]


def test_each_case_of_the_page_is_tried_here_or_elsewhere() -> None:
    assert sorted(rows()) == sorted([*KNOWN_BEFORE, *SHOWN_LATER])
    assert all((ROOT / file).is_file() for file in SHOWN_LATER.values())


@pytest.mark.parametrize("case", KNOWN_BEFORE)
def test_where_it_cannot_be_done_no_worker_says_that_it_would_come(case: str) -> None:
    """A worker that said so would be waited for, and the run would go on with other bits, or hang."""
    assert not recovers(*KNOWN_BEFORE[case])


@pytest.mark.parametrize("mirror", [True, False])
@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_what_is_sharded_is_outlived_where_it_is_mirrored(sharding: str, mirror: bool) -> None:
    assert recovers({"sharding": sharding, "faults": {"mirror": mirror}}, CPU, AttemptOrigin()) == mirror


def test_a_torch_whose_sharding_cannot_be_taken_off_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the parts of FSDP2 that this needs, the table of modules is torch's own."""
    monkeypatch.delattr("torch.distributed._composable_state._module_state_mapping")
    assert not recovers({"sharding": "full", "faults": {"mirror": True}}, CPU, AttemptOrigin())
    assert recovers({"sharding": "optimizer", "faults": {"mirror": True}}, CPU, AttemptOrigin())


@pytest.mark.parametrize("origin", [None, AttemptOrigin(), AttemptOrigin("a" * 32, 2)])
def test_any_other_run_goes_on_in_memory(origin: AttemptOrigin | None) -> None:
    """The control: on the CPU, with a whole optimizer, the exact reduction and one loss."""
    assert recovers({}, CPU, origin)


# --- coming to the next group -----------------------------------------------------------------------------

LOST = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")


class Noted(Group):
    """A worker's view of a group that notes in `store` how it ends."""

    __slots__ = ()

    def abort(self) -> None:
        self.store.append(("aborted", self.channel))

    def close(self) -> None:
        self.store.append(("closed", self.channel))


class Rendezvous:
    """It answers each worker that comes with the next of `answers`, of which an error is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.came: list[tuple[str, Any, Progress | None]] = []

    def ready(self, seat: Seat) -> None: ...

    def enter(self, seat: Seat) -> Seat | None:
        return self._answer("enters", seat, None)

    def regroup(self, seat: Seat, progress: Progress | None) -> Seat | None:
        return self._answer("regroups", seat, progress)

    def _answer(self, how: str, seat: Seat, progress: Progress | None) -> Seat | None:
        self.came.append((how, seat.group.channel, progress))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]


def seated(ends: list[Any]) -> Seat:
    return Seat(Noted(0, 2, CPU, "channel", ends), tell_nobody, NoRequests(), None)


def one_that_trains(step: int = 3, reached: int = 3) -> Any:
    """A run after `step` steps, of which `reached` have rows; it notes what is taken back."""
    noted: list[Any] = []
    return SimpleNamespace(
        noted=noted,
        step=SimpleNamespace(
            abandon=lambda recorded: noted.append(("abandoned", recorded)),
            take_back=lambda: noted.append("taken back"),
            take_back_evaluation=lambda: noted.append("evaluation taken back"),
        ),
        history=SimpleNamespace(
            reached=reached, take_back=lambda step, evaluated: noted.append(("rows", step, evaluated))
        ),
        state=SimpleNamespace(
            counters=SimpleNamespace(step=step, evaluated=2),
            evaluation_begun=0,
            lacks_evaluation=False,
            mirrored=SimpleNamespace(take_back=lambda step: noted.append(("spans", step))),
        ),
    )


@pytest.mark.parametrize("answer", [None, LeftError("it leaves")])
def test_a_worker_that_nobody_lets_in_gives_up(answer: Any) -> None:
    ends: list[Any] = []
    rendezvous = Rendezvous(answer)
    assert let_in(one_that_trains(), seated(ends), rendezvous) is None
    assert (rendezvous.came, ends) == ([("enters", "channel", None)], [])


def test_a_joining_worker_outlives_a_loss_and_comes_again_without_a_state() -> None:
    """Its group is broken off, and nothing is left of it: the next rendezvous would break it off once more."""
    ends: list[Any] = []
    rendezvous = Rendezvous(LOST, LOST, None)
    assert let_in(one_that_trains(), seated(ends), rendezvous) is None
    assert rendezvous.came == [("enters", "channel", None), *[("regroups", None, None)] * 2]
    assert ends == [("aborted", "channel"), ("aborted", None)]
    with pytest.raises(ZeroDivisionError):
        let_in(one_that_trains(), seated(ends), Rendezvous(ZeroDivisionError()))


def test_a_worker_whose_peer_is_lost_breaks_off_and_comes_as_far_as_it_is() -> None:
    """Where nobody goes on, the loss is what ends the attempt. It comes again where another is lost at the rendezvous."""
    ends: list[Any] = []
    run, rendezvous = one_that_trains(), Rendezvous(LOST, None)
    with pytest.raises(RuntimeError) as raised:
        regrouped(run, seated(ends), rendezvous, LOST)
    assert raised.value is LOST
    assert rendezvous.came == [("regroups", None, Progress(3, 2, 0))] * 2
    assert ends == [("aborted", "channel"), ("aborted", None)]
    assert run.noted == [("abandoned", 3)] * 2


def test_a_planned_rendezvous_breaks_nothing_off_unless_a_worker_is_lost_at_it() -> None:
    ends: list[Any] = []
    planned = RegroupError("the workers meet")
    rendezvous = Rendezvous(None)
    with pytest.raises(RegroupError):
        regrouped(one_that_trains(), seated(ends), rendezvous, planned)
    assert (rendezvous.came[0][1], ends) == ("channel", [])
    with pytest.raises(RegroupError):
        regrouped(one_that_trains(), seated(ends), Rendezvous(LOST, None), planned)
    assert ends == [("aborted", "channel")]


def test_a_worker_whose_newest_row_is_lost_comes_to_no_rendezvous() -> None:
    """The others could not get the row from it either."""
    rendezvous = Rendezvous()
    with pytest.raises(RuntimeError):
        regrouped(one_that_trains(3, 2), seated([]), rendezvous, LOST)
    assert rendezvous.came == []


def test_a_worker_that_was_handed_the_state_of_a_step_before_forgets_the_row_of_the_next_one() -> None:
    """It was lost before it had come to the end of going on."""
    run, rendezvous = one_that_trains(3, 4), Rendezvous(None)
    with pytest.raises(RuntimeError):
        regrouped(run, seated([]), rendezvous, LOST)
    assert run.noted == [("abandoned", 4), ("rows", 3, 2)]
    assert rendezvous.came == [("regroups", None, Progress(3, 2, 0))]


@pytest.mark.parametrize(
    ("progress", "taken_back"),
    [
        (Progress(3, 2), []),
        (Progress(3, 1), ["evaluation taken back"]),
        (Progress(2, 2), ["taken back", ("rows", 3, 2)]),
    ],
)
def test_a_worker_with_mirrors_returns_to_the_step_of_the_others(
    progress: Progress, taken_back: list[Any]
) -> None:
    """To all of it, or to nothing: a loss between two halves would leave it with those of two states."""
    run = one_that_trains(3)
    return_to(run, progress)
    assert run.noted == [("spans", progress.step), *taken_back]
    assert run.state.lacks_evaluation == ("evaluation taken back" in taken_back)
    run.state.mirrored = None
    run.noted.clear()
    return_to(run, progress)
    assert run.noted == []


def test_an_evaluation_is_taken_back_once() -> None:
    """Its shards are cut for another group by then."""
    run = one_that_trains(3)
    return_to(run, Progress(3, 1))
    return_to(run, Progress(3, 1))
    assert run.noted.count("evaluation taken back") == 1


class Gathering:
    """A group whose ranks report what is given here, as one of one rank alone."""

    size = 1
    rank = 0

    def __init__(self, *reports: tuple[Progress | None, bool, bool]) -> None:
        self.reports = reports

    def gather(self, report: Any) -> list[Any]:
        return list(self.reports)


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param([(Progress(6, 6), False, True)] * 2, id="none has it whole"),
        pytest.param([(Progress(6, 6), False, True), (Progress(6, 6), False, False)], id="one is as far"),
    ],
)
def test_nobody_goes_on_with_half_of_an_evaluation(reports: list[Any]) -> None:
    state: Any = SimpleNamespace(
        job=SimpleNamespace(state_dict=dict),
        counters=SimpleNamespace(step=6, evaluated=6),
        evaluation_begun=6,
        lacks_evaluation=True,
    )
    with raises(problems.OTHER_STATES):
        agree_on_state(Gathering(*reports), state, lambda progress: None)  # type: ignore[arg-type]


def test_rows_are_handed_to_those_who_join_alone() -> None:
    """A run may have a million of them."""
    state: Any = SimpleNamespace(
        job=SimpleNamespace(state_dict=dict),
        counters=SimpleNamespace(step=6, evaluated=6),
        evaluation_begun=6,
        lacks_evaluation=False,
        mirrored=None,
    )
    survivor = Gathering((Progress(6, 6), False, False))
    assert agree_on_state(survivor, state, lambda progress: None) == (0, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "rows"), [(0, [2]), (1, [1, 2])])
def test_a_worker_tells_what_the_record_may_lack(rank: int, rows: list[int]) -> None:
    """Of the newest step, where it told the others itself; of all of them, where the first rank did, which may be the one that is lost. Not of a step that is taken again."""
    spec = load_spec(
        {**PLAIN, "batch": {"global": 8, "micro": 2}, "record": {"uri": "off"}, "rehearsal": "off"}
    )
    alone = Group(0, 1, CPU)
    with surroundings(spec):
        run = prepare(spec, load_job(spec.job.use, spec.job.params), alone, tell_nobody)
    for step in (1, 2, 3):
        run.history.add(step_row(step))
    run.state.counters.step = 2  # that of a rank which has done less
    told: list[Event] = []
    seat = Seat(alone, told.append, NoRequests(), AttemptOrigin(attempt=2))
    before = Seat(Group(rank, 2, CPU), tell_nobody, NoRequests(), None)
    taken = taken_on(run, seat, before)
    assert (taken.start, taken.history.reached) == (None, 2)
    assert isinstance(told[0], Started)
    (restored,) = [event for event in told if isinstance(event, Restored)]
    assert [row.step for row in restored.steps] == rows


def test_an_attempt_in_memory_is_claimed_with_its_first_save() -> None:
    origin = AttemptOrigin("a" * 32, 2, table_versions={"points": "3"})
    assert next_attempt(origin, 5) == AttemptOrigin(None, 5, in_memory=True, table_versions={"points": "3"})
    assert next_attempt(None, 5) is None
