"""Two attempts on an object store at once: in no order of their calls is the newest good checkpoint lost."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lockstep.checkpoint.layout import MANIFEST
from lockstep.checkpoint.reader import load_newest
from lockstep.checkpoint.runs import run_folder
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from tests.unit.checkpoint.interleaved import RUN, Actor, good_steps, state
from tests.unit.checkpoint.one_process import write_checkpoint
from tests.unit.checkpoint.states import same

WHICH = st.integers(0, 1)


def objects(prefix: str) -> dict[str, bytes]:
    """What the server holds, from the server itself: a hundred requests take longer than a schedule."""
    return {name: key.value for name, key in _keys().items() if name.startswith(f"{prefix}/")}


def forget(prefix: str) -> None:
    """Leave nothing of a schedule: each look goes through all that the server holds."""
    for name in [name for name in dict(_keys()) if name.startswith(f"{prefix}/")]:
        dict.pop(_keys(), name)


def _keys() -> Any:
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets["runs"].keys


def machine(query: str) -> type[RuleBasedStateMachine]:
    class Interleaved(RuleBasedStateMachine):
        """Two processes at a time; one that is over is followed by another."""

        @initialize()
        def begin(self) -> None:
            self.prefix = uuid.uuid4().hex
            self.uri = f"s3://key:secret@runs/{self.prefix}?{query}"
            tokens = itertools.count(1)
            run_folder.uuid = SimpleNamespace(  # type: ignore[assignment]
                uuid4=lambda: SimpleNamespace(hex=f"{next(tokens):08x}")
            )
            run = RunFolder.create(open_storage(self.uri), RUN)
            write_checkpoint(run.claim(), 1, state(1))
            self.in_flight: list[Callable[[], None]] = []
            self.actors: list[Actor] = []
            self.newest, self.numbers = 1, []

        @precondition(lambda self: len(self.actors) < 2)
        @rule()
        def resume(self) -> None:
            self.actors.append(Actor(self.uri, self.in_flight))
            self.advance(len(self.actors) - 1, "go")

        @precondition(lambda self: self.actors)
        @rule(which=WHICH, calls=st.integers(1, 30))
        def go_on(self, which: int, calls: int) -> None:
            for _ in range(calls):
                self.advance(which, "go")

        @precondition(lambda self: self.actors)
        @rule(which=WHICH)
        def time_out(self, which: int) -> None:
            self.advance(which, "time out")

        @precondition(lambda self: self.actors)
        @rule(which=WHICH)
        def kill(self, which: int) -> None:
            self.advance(which, "end")

        @precondition(lambda self: self.in_flight)
        @rule(which=st.integers(0, 5))
        def arrive(self, which: int) -> None:
            change = self.in_flight.pop(which % len(self.in_flight))
            with suppress(Exception):  # nobody waits for its answer any more
                change()
            self.look()

        def advance(self, which: int, verdict: str) -> None:
            if not self.actors:
                return
            actor = self.actors[which % len(self.actors)]
            actor.step(verdict)
            if actor.error is not None:
                raise actor.error
            if actor.number and actor not in [one for one, _ in self.numbers]:
                self.numbers.append((actor, actor.number))
                assert len({number for _, number in self.numbers}) == len(self.numbers), "one number for two"
            if actor.over:
                self.actors.remove(actor)
            self.look()

        def look(self) -> None:
            good = good_steps(objects(self.prefix))
            assert good and good[-1] >= self.newest, f"step {self.newest} was good, now {good} are"
            self.newest = good[-1]

        def teardown(self) -> None:
            for actor in getattr(self, "actors", []):
                while not actor.over:
                    actor.step("end")
            run_folder.uuid = uuid
            if hasattr(self, "uri"):
                found = load_newest(RunFolder.open(open_storage(self.uri), RUN), lambda text: None)
                assert found is not None and found.manifest.step == self.newest
                assert same(found.sections["model"], state(self.newest)["model"])
                forget(self.prefix)

    return Interleaved


def tried(query: str, schedules: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(query),
        settings=settings(
            max_examples=schedules,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_order_of_calls_loses_the_newest_good_checkpoint(s3: str) -> None:
    tried(s3, 2)


@pytest.mark.exact
def test_a_thousand_orders_of_calls_lose_no_checkpoint(s3: str) -> None:
    tried(s3, 1000)


def late_manifest(query: str) -> tuple[list[int], list[int]]:
    """The good steps before and after a manifest arrives whose attempt has ended, and was replaced, long ago."""
    prefix = uuid.uuid4().hex
    uri = f"s3://key:secret@runs/{prefix}?{query}"
    run = RunFolder.create(open_storage(uri), RUN)
    write_checkpoint(run.claim(), 1, state(1))
    in_flight: list[Callable[[], None]] = []
    first = Actor(uri, in_flight)
    while not (first.changes and "step-000000002/manifest" in first.at):
        first.step()
    first.step("end")
    second = Actor(uri, in_flight)
    while good_steps(objects(prefix)) != [2]:  # it has saved step 2 anew, and deleted step 1
        second.step()
    before = good_steps(objects(prefix))
    in_flight.pop()()
    after = good_steps(objects(prefix))
    while not second.over:
        second.step("end")
    return before, after


def test_a_manifest_that_is_late_takes_the_place_of_no_other(s3: str) -> None:
    assert late_manifest(s3) == ([2], [2])


def test_a_late_manifest_of_the_same_name_leaves_no_good_checkpoint(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: manifests that do not bear their attempt."""
    monkeypatch.setattr(Attempt, "manifest", property(lambda attempt: MANIFEST))
    assert late_manifest(s3) == ([2], [])
