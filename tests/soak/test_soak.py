"""What the soak tries, whether it sees a difference, and how it makes a case smaller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.pool import Pool
from tests.fading import Fading
from tests.soak.__main__ import shrink
from tests.soak.cases import draw, smaller
from tests.soak.programs import PROGRAMS, Drawn
from tests.soak.trial import attempt

CASE: dict[str, Any] = {
    "spec": {
        "job": {"use": "tests.soak.programs:Drawn", "params": {"layers": ["dropout"], "noise": True}},
        "batch": {"global": 8, "micro": 2},
        "length": {"steps": 6},
        "data": {"shuffle": "full", "drop_last": False},
        "evaluate": {"every": {"steps": 2}},
    },
    "attempts": [
        {"workers": 2, "sharding": "none", "loader_processes": 0, "fall": [1, 4, "forward", 1]},
        {"workers": 1, "sharding": "none", "loader_processes": 0, "stop_after": 5},
        {"workers": 3, "sharding": "optimizer", "loader_processes": 0},
    ],
    "changes": {"workers": 2, "falls": [[0, 3, "update", 1, False]], "joining": [4, 1], "sharding": "none"},
    "save_every": 2,
}


class Forgetful(Drawn):
    """What its optimizer remembers is in no checkpoint."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Fading(model.parameters(), lr=0.05)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with closing(Pool(3)) as processes:
        yield processes


@pytest.mark.scenario
def test_a_case_that_loses_workers_comes_to_the_bits_of_the_run_left_alone(pool: Pool) -> None:
    outcome = attempt(pool, CASE)
    assert not outcome.wrong
    assert outcome.faults == 4  # killed, stopped; lost, joined
    assert outcome.refused == ()


@pytest.mark.scenario
def test_what_a_checkpoint_lacks_shows(pool: Pool) -> None:
    job = {"use": "tests.soak.test_soak:Forgetful", "params": {"layers": ["dropout"]}}
    case = {
        **CASE,
        "changes": None,
        "spec": {**CASE["spec"], "job": job, "rehearsal": "off"},
    }  # it would be refused
    case["attempts"] = [{**CASE["attempts"][1], "stop_after": 3}, CASE["attempts"][1]]
    assert attempt(pool, case).wrong.startswith("rows of attempt")


@pytest.mark.scenario
def test_a_case_that_fails_is_made_smaller_until_nothing_can_be_left_out(pool: Pool) -> None:
    """Two layers in one, of which the second is refused: a name that no program knows."""
    params = {**CASE["spec"]["job"]["params"], "layers": ["dropout", "no such layer"]}
    params |= {
        "augment": True,
        "weighted": False,
        "frozen": True,
        "metric": False,
        "optimizer": "",
        "held_out": 7,
    }
    case = {
        **CASE,
        "spec": {**CASE["spec"], "job": {**CASE["spec"]["job"], "params": params}, "precision": "bf16"},
    }
    least = shrink(pool, case)
    assert least["attempts"] == []
    assert least["changes"] is None
    assert least["spec"]["precision"] == "fp32"
    assert least["spec"]["job"]["params"]["layers"] == ["no such layer"]
    assert not least["spec"]["job"]["params"]["augment"]


def test_a_seed_always_gives_the_same_case_and_all_programs_are_drawn() -> None:
    drawn = [draw(seed) for seed in range(60)]
    assert [draw(seed) for seed in range(60)] == drawn == json.loads(json.dumps(drawn))
    assert {case["spec"]["job"]["use"].partition(":")[2] for case in drawn} == {
        one.__name__ for one in PROGRAMS
    }
    for case in drawn:
        for less in smaller(case):
            assert less != case
            assert len(json.dumps(less)) <= len(json.dumps(case)) + 8  # a plain word may be longer
