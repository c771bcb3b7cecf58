"""G1 for the units of a sharded model: which modules they are, and when they are gathered and let go of, is placement."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

import lockstep.training.step.fsdp_collectives as fsdp_collectives
import lockstep.training.step.full_sharding as full_sharding
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.training import problems
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.test_full_sharding import (
    RUN,
    attempt_with_many_writers,
    folder,
    held,
    kinds,
    reference,
    saving,
    sharded_names,
    small,
)
from tests.distributed.test_sharded_estimate import estimate_of
from tests.distributed.training import Document, Trained, train
from tests.raised import raises

HERE = "tests.distributed.test_units"

SETTINGS: dict[str, Document] = {
    "named": {"units": ["blocks.*.into", "blocks.*.out", "head"]},
    "by class": {"units": ["Block"], "prefetch": 0},
    "far ahead": {"prefetch": 3},
    "kept": {"reshard_after_forward": False},
    "kept, ahead": {"units": ["blocks.?", "twice.*"], "prefetch": 2, "reshard_after_forward": False},
}


def placed(document: Document, name: str) -> Document:
    return {**document, "sharding": {"mode": "full", **SETTINGS[name]}}


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize(("name", "workers"), [("named", 3), ("by class", 2), ("far ahead", 2), ("kept", 2)])
def test_no_setting_of_the_units_changes_a_bit(pool: Pool, name: str, workers: int) -> None:
    assert pool.run(workers, train, placed(kinds("adamw"), name)) == [reference("adamw")] * workers


@pytest.mark.exact
@pytest.mark.parametrize(
    ("kind", "name", "workers"), list(product(("adamw", "sgd", "recomputed"), SETTINGS, (1, 2, 3, 4)))
)
def test_no_setting_of_the_units_changes_a_bit_in_full(
    pool: Pool, kind: str, name: str, workers: int
) -> None:
    assert pool.run(workers, train, placed(kinds(kind), name)) == [reference(kind)] * workers


@pytest.mark.scenario
def test_a_run_is_taken_up_with_other_units(pool: Pool, tmp_path: Path) -> None:
    wanted = reference("adamw")
    first = placed(saving(tmp_path, "full"), "named")
    assert pool.run(3, attempt_with_many_writers, first, AttemptOrigin()) == [wanted] * 3
    for name, workers, step in (("kept", 2, 2), ("far ahead", 4, 3)):
        origin = AttemptOrigin(RUN, folder(tmp_path).claim().number, step)
        for found in pool.run(
            workers, attempt_with_many_writers, placed(saving(tmp_path, "full"), name), origin
        ):
            assert (found.rows, found.identity) == (wanted.rows, wanted.identity)
            assert found.digests == wanted.digests[step:]


# --- the modules that are units -----------------------------------------------------------------------------------


@pytest.mark.scenario
def test_units_are_the_modules_that_are_named(pool: Pool) -> None:
    """Of nested modules the outermost; what is computed twice in a micro-batch is none, and the run says so."""
    short = {**kinds("adamw"), "length": {"steps": 1}}
    named = placed(short, "named")
    assert pool.run(2, sharded_names, named)[0][0] == [
        name for i in range(3) for name in (f"blocks.{i}.into", f"blocks.{i}.out")
    ] + ["head"]
    nested = {**short, "sharding": {"mode": "full", "units": ["blocks.*", "Linear"]}}
    assert pool.run(2, sharded_names, nested)[0][0] == ["blocks.0", "blocks.1", "blocks.2", "head"]
    (found,) = pool.run(2, train, nested)[:1]
    (told,) = [text for text in found.warnings if text.startswith("sharding.units")]
    assert told.startswith("sharding.units: 'twice.0' is no unit: a loss computes it several times")


def test_a_name_of_no_module_is_refused(pool: Pool) -> None:
    document = {**kinds("adamw"), "sharding": {"mode": "full", "units": ["block.*"]}}
    with raises(problems.NO_UNIT, field="sharding.units", got="block.*"):
        pool.run(2, train, document)


# --- when they are gathered ---------------------------------------------------------------------------------------


class Deep(Plain):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 16),
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)),
            nn.Linear(16, 3),
        )


def gathers(document: Document) -> tuple[int, int]:
    """How many gathers the last pass of a run begins, and how many it has begun before it waits for one of them, at most."""
    begun, waited = fsdp_collectives.Gather.__call__, fsdp_collectives.Gathering.wait
    begin_pass = full_sharding.FullSharding.begin_pass
    of_pass: list[list[int]] = []

    def begin(self: Any, *given: Any, **named: Any) -> Any:
        of_pass[-1].append(1)
        return begun(self, *given, **named)

    def wait(self: Any, *given: Any) -> bool:
        of_pass[-1].append(-1)
        return waited(self, *given)

    def note(self: Any, *given: Any, **named: Any) -> None:
        of_pass.append([])
        begin_pass(self, *given, **named)

    of_pass.append([])
    with (
        mock.patch.object(fsdp_collectives.Gather, "__call__", begin),
        mock.patch.object(fsdp_collectives.Gathering, "wait", wait),
        mock.patch.object(full_sharding.FullSharding, "begin_pass", note),
    ):
        train(document)
    last = next(each for each in reversed(of_pass) if each)
    return last.count(1), max(sum(last[: i + 1]) for i in range(len(last)))


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"prefetch": 0}, (16, 1)),
        ({"prefetch": 1}, (16, 1)),
        ({"prefetch": 3}, (16, 3)),
        ({"prefetch": 1, "reshard_after_forward": False}, (8, 1)),
    ],
)
def test_units_are_gathered_as_far_ahead_as_is_said(
    pool: Pool, settings: Document, wanted: tuple[int, int]
) -> None:
    """Eight units, gathered for forward and again for backward; a unit that was gathered ahead is waited for when it computes."""
    document = small(f"{HERE}:Deep", sharding={"mode": "full", **settings}, evaluate={"every": {"steps": 99}})
    assert pool.run(2, gathers, document)[0] == wanted


class Turning(nn.Module):
    """Computes its blocks from the first to the last, and in every other step from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.turns = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for block in reversed(self.blocks) if self.turns else self.blocks:
            h = h + block(h).tanh()
        return self.out(h)


class Turns(Plain):
    def model(self) -> nn.Module:
        return Turning()

    def after_step(self, model: Any, step: int) -> None:
        model.turns = step % 2 == 1


def gathered_before_the_update(document: Document) -> Trained:
    """Every unit is gathered for the next step before this step has updated it."""
    end_pass = full_sharding.FullSharding.end_pass

    def ahead(self: full_sharding.FullSharding, where: str) -> None:
        end_pass(self, where)
        for module in self._modules:
            module.unshard()

    with mock.patch.object(full_sharding.FullSharding, "end_pass", ahead):
        return train(document)


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("prefetch", [1, 4])
def test_what_was_gathered_for_another_order_is_not_used(pool: Pool, prefetch: int) -> None:
    """A step that computes its modules in another order than the one before has gathered some for nothing; no later step computes with them."""
    document = small(f"{HERE}:Turns", length={"steps": 5}, rehearsal="off")
    full = {**document, "sharding": {"mode": "full", "prefetch": prefetch}}
    wanted = train(document)
    assert pool.run(2, train, full) == [wanted] * 2
    assert pool.run(2, gathered_before_the_update, full)[0].rows != wanted.rows  # the control


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize("settings", [{}, {"prefetch": 3}, {"reshard_after_forward": False}])
def test_an_estimate_counts_what_is_gathered_at_once(pool: Pool, settings: Document) -> None:
    document = small("tests.distributed.test_full_sharding:Deep", sharding={"mode": "full", **settings})
    estimated = estimate_of(document, 2)
    assert pool.run(2, held, document)[0]["communication_bytes"] == estimated["communication_bytes"]
    sets = 2 if settings.get("reshard_after_forward", True) else 1
    whole = held(small("tests.distributed.test_full_sharding:Deep"))["parameters_bytes"]
    assert estimated["sent_bytes"] == 2 * (sets + 1) * whole // 2
