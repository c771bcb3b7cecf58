"""Each mistake that `job.use` and the class behind it can have is told as the problem that it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import Problem
from lockstep.job import problems
from lockstep.job.interface import Updates
from lockstep.job.loading import load_job
from lockstep.job.source import check_job_source
from tests.raised import raises

HEAD = """
import lockstep

class Whole(lockstep.Job):
    def model(self): ...
    def train_data(self): ...
    def loss(self, model, batch): ...

"""

DRAWN = (
    "import time\nfrom pydantic import Field\nclass Mine(Whole):\n"
    "    class Params(lockstep.Params):\n        stamp: {kind} = Field(default_factory=time.perf_counter)"
)

MISTAKES: list[tuple[str, Problem[Any], dict[str, Any]]] = [
    ("class Mine: ...", problems.NO_JOB, {"got": "refused_job:Mine"}),
    ("class Mine(Whole):\n    class Params: ...", problems.NO_PARAMS, {}),
    ("class Other(Whole): ...", problems.NO_CLASS, {"module": "refused_job", "got": "Mine"}),
    ("class Mine(lockstep.Job): ...", problems.METHOD_MISSING, {"method": "model"}),
    ("class Mine(Whole):\n    def training_step(self): ...", problems.METHOD_UNUSED, {"method": "training_step"}),
    ("class Mine(Whole):\n    def phases(self): ...\n    def optimizer(self, model): ...", problems.OPTIMIZER_BESIDE_PHASES, {}),
    ("class Mine(Whole):\n    def batch_loss(self, model, rows): ...", problems.NO_EMBED, {}),
    ("class Mine(Whole):\n    def phases(self): ...\n    def embed(self, model, batch): ...\n    def batch_loss(self, model, rows): ...", problems.BATCH_LOSS_BESIDE_PHASES, {}),
    ("class Mine(Whole):\n    def after_step(self, model, step): ...\n    def step_statistics(self, model, batch): ...", problems.STATISTICS_UNUSED, {}),
    ("class Mine(Whole):\n    def figures(self, outputs): ...", problems.NO_OUTPUTS, {"method": "figures"}),
    ("class Mine(Whole):\n    def outputs(self, model, batch): ...", problems.OUTPUTS_UNUSED, {}),
    ("class Mine(Whole):\n    def collate(self): ...", problems.SIGNATURE, {"method": "collate", "call": "collate(samples)"}),
    ("class Mine(Whole):\n    def __init__(self, params):\n        raise ValueError('no')", problems.NOT_MADE, {"got": "ValueError: no"}),
    (DRAWN.format(kind="float"), problems.PARAM_DRAWN, {"name": "stamp"}),
    ("1 / 0", problems.IMPORT_FAILED, {"got": "ZeroDivisionError: division by zero"}),
]  # fmt: skip
"""What a module holds after HEAD, and what is told of its `Mine`."""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes the module `refused_job`, which can be imported in this test alone."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> None:
        (tmp_path / "refused_job.py").write_text(source)

    yield write
    sys.modules.pop("refused_job", None)


@pytest.mark.parametrize(("source", "problem", "facts"), MISTAKES, ids=[it[1].code for it in MISTAKES])
def test_a_mistake_in_a_job_is_told_when_it_is_loaded(
    write: Callable[[str], None], source: str, problem: Problem[Any], facts: dict[str, Any]
) -> None:
    write(HEAD + source)
    with raises(problem, **facts):
        load_job("refused_job:Mine", {})


def test_a_param_that_is_placement_may_have_another_value_each_time(write: Callable[[str], None]) -> None:
    write(HEAD + DRAWN.format(kind="lockstep.Placement[float]"))
    assert load_job("refused_job:Mine", {}).params.stamp > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("use", "source", "problem", "facts"),
    [
        ("refused_job", HEAD, problems.FORM, {"got": "refused_job"}),
        ("__main__:Mine", HEAD, problems.OF_SCRIPT, {"got": "__main__:Mine"}),
        ("lockstep_main:Mine", HEAD, problems.OF_RECORD, {"got": "lockstep_main:Mine"}),
        ("refused_jop:Mine", HEAD, problems.NO_MODULE, {"got": "refused_jop"}),
        ("refused_job:Mine", "class Mine(:", problems.SYNTAX, {"line": 1}),
        ("refused_job:Hole", HEAD, problems.NO_CLASS, {"hint": "; did you mean 'Whole'?"}),
    ],
    ids=lambda value: value.code if isinstance(value, Problem) else "",
)
def test_a_name_that_leads_nowhere_is_told_before_anything_is_imported(
    write: Callable[[str], None], use: str, source: str, problem: Problem[Any], facts: dict[str, Any]
) -> None:
    write(source)
    with raises(problem, **facts):
        check_job_source(use)
    assert "refused_job" not in sys.modules


def test_updates_of_an_epoch_that_has_no_one_number_of_them_are_refused() -> None:
    """The control is a run whose global batch has one size."""
    assert Updates(6, 3).per_epoch == 3
    with raises(problems.UPDATES_PER_EPOCH):
        _ = Updates(6, None, 2).per_epoch
