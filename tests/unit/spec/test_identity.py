"""What the identity of a run covers, and what it leaves out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.job.identity import changed_fields, deciding, identity_digest, identity_fields
from lockstep.spec.loading import load_spec
from tests.unit.job.test_source import forget

FACTS = {"device": "cpu", "numerics_probe": "p", "data.train_samples": 100, "workers": 2}


def digest(*overrides: str, **facts: Any) -> str:
    document = {"job": {"use": "jobs.digits.job:Digits"}, "batch": {"global": 64, "micro": 8}}
    spec = load_spec(document, overrides)
    return identity_digest(identity_fields(spec, {**FACTS, **facts}))


@pytest.mark.parametrize(
    "override",
    [
        "workers.max=4",
        "workers.bucket_mb=1.0",
        "data.loader_processes=2",
        "checkpoint.storage=elsewhere",
        "record.uri=off",
        "name=another",
        "determinism.recheck=0.01",
        "evaluate.beside=true",  # nothing is decided by an evaluation
        "evaluate.delay=7",
    ],
)
def test_placement_is_no_part_of_the_identity(override: str) -> None:
    """G1: what may differ between two runs of the same bits."""
    assert digest(override) == digest()


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "length.epochs=2",
        "batch.micro=16",
        "data.drop_last=false",
        "data.shuffle=none",
        "optimizer.lr=0.5",
        "schedule.name=linear",
        "precision=bf16",
        "clip_norm=1.0",
        "determinism=fast",
        "threads=2",
        "reduction=native",
        "activation_checkpointing=true",
        "compile=true",
        "evaluate.every.steps=3",
        "early_stop={patience: 2}",
        "job.params.width=8",
    ],
)
def test_what_changes_the_bits_changes_the_identity(override: str) -> None:
    assert digest(override) != digest()


def test_a_jobs_placement_is_no_part_of_it() -> None:
    """Where a table lies and what memory it may take; its width is, in the same job."""

    def of(**params: Any) -> str:
        document = {"job": {"use": "jobs.tabular.job:Tabular", "params": params}}
        return identity_digest(identity_fields(load_spec(document), FACTS))

    assert of(train="here", memory_mb=3.0) == of(train="there") == of()
    assert of(width=8) != of()


def test_what_a_resume_changes_of_placement_is_no_change() -> None:
    job = {"use": "jobs.tabular.job:Tabular", "params": {"train": "here", "width": 8}}
    before = load_spec({"job": job})
    assert changed_fields(before, load_spec({"job": job}, ["job.params.train=there"])) == []
    moved = load_spec({"job": job}, ["job.params.train=there", "job.params.width=9"])
    assert changed_fields(before, moved) == [("job.params.width", 8, 9)]


@pytest.mark.parametrize("fact", [{"device": "H200"}, {"numerics_probe": "q"}, {"data.train_samples": 101}])
def test_the_machine_and_the_data_are_part_of_it(fact: dict[str, Any]) -> None:
    assert digest(**fact) != digest()


def test_workers_and_buckets_count_where_the_reduction_is_native() -> None:
    """A native sum depends on who adds; an exact one does not."""
    assert digest(workers=3) == digest()
    assert digest("reduction=native", workers=3) != digest("reduction=native")
    assert digest("reduction=native", "workers.bucket_mb=1.0") != digest("reduction=native")


def test_initial_weights_count_by_their_bits_and_not_by_their_path(tmp_path: Path) -> None:
    assert digest(f"initial_weights={tmp_path}/a.safetensors") == digest()
    assert digest(initial_weights_digest="x") != digest(initial_weights_digest="y")


JOB = """
import enum
from typing import Any
import lockstep

class Kind(enum.Enum):
    A = "a"

class Mine(lockstep.Job):
    class Params(lockstep.Params, extra="allow"):
        value: Any = None
        shape: tuple[int, int] = (1, 2)
        kind: Kind = Kind.A
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """The digest of what decides in a spec of a job that takes any params."""
    (tmp_path / "job_of_identity.py").write_text(JOB)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def of(*overrides: str, **params: Any) -> str:
        job = {"use": "job_of_identity:Mine", "params": params}
        return identity_digest(deciding(load_spec({"job": job}, overrides)))

    yield of
    forget(tmp_path)


PAIRS = {
    "a dotted key and a nested one": ({"a.b": 5}, {"a": {"b": 5}}),
    "the order of a mapping": ({"x": 1.0, "y": 0.1}, {"y": 0.1, "x": 1.0}),
    "a number and its text": (1, "1"),
    "true and one": (True, 1),
    "one and 1.0": (1, 1.0),
    "the sign of zero": (0.0, -0.0),
    "nothing and an empty mapping": (None, {}),
    "an empty list and an empty mapping": ([], {}),
    "a key that looks like a mark": ({"$tuple": [1]}, [1]),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_params_that_a_job_can_tell_apart_are_two_identities(kind: str, mine: Callable[..., str]) -> None:
    """G1: its job may compute other bits from each."""
    one, other = PAIRS[kind]
    assert mine(value=one) != mine(value=other)
    assert mine(value={"in": [one]}) != mine(value={"in": [other]})
    assert mine(value=one) == mine(value=one)
    before, after = (
        load_spec({"job": {"use": "job_of_identity:Mine", "params": {"value": v}}}) for v in (one, other)
    )
    assert changed_fields(before, after)
    assert not changed_fields(after, after)


def test_extra_params_count_in_their_order(mine: Callable[..., str]) -> None:
    """A job sees them as a mapping; those that it declares have no order."""
    assert mine(b=1, a=2) != mine(a=2, b=1)
    assert mine(value=1, shape=[1, 2]) == mine(shape=[1, 2], value=1) == mine(value=1)


def test_an_extra_param_is_never_taken_for_a_part_of_another(mine: Callable[..., str]) -> None:
    assert mine(**{"value.a": 1}) != mine(value={"a": 1})


def test_a_difference_inside_a_param_is_told_by_its_place(mine: Callable[..., str]) -> None:
    use = {"use": "job_of_identity:Mine"}
    before, after = (
        load_spec({"job": {**use, "params": {"value": {"a.b": {"c": width}}}}}) for width in (8, 9)
    )
    assert changed_fields(before, after) == [("job.params.value['a.b']['c']", 8, 9)]


def test_a_section_that_is_left_out_is_told_by_what_the_other_one_has() -> None:
    document = {"job": {"use": "jobs.digits.job:Digits"}}
    before, after = load_spec(document), load_spec(document, ["early_stop={patience: 2}"])
    names = [one.name for one in changed_fields(before, after)]
    assert names == ["early_stop.metric", "early_stop.mode", "early_stop.patience"]


def test_when_an_evaluation_decides_is_identity_where_it_does_and_who_makes_it_is_not() -> None:
    rule = "early_stop={patience: 2}"
    at_once, later = digest(rule), digest(rule, "evaluate.beside=true")
    assert (
        later
        == digest(rule, "evaluate.delay=next")
        == digest(rule, "evaluate.beside=true", "evaluate.delay=next")
    )
    assert (
        at_once
        == digest(rule, "evaluate.delay=0")
        == digest(rule, "evaluate.beside=true", "evaluate.delay=0")
    )
    assert len({at_once, later, digest(rule, "evaluate.delay=7")}) == 3
