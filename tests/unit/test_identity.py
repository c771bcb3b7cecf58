"""What the identity of a run covers, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.job.identity import changed_fields, identity_digest, identity_fields
from lockstep.spec.loading import load_spec

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
