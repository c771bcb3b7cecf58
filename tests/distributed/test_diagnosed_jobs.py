"""Jobs with one fault each, trained: the rows of each name its fault and nothing else, and sound ones say nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.communication.group import Group
from lockstep.job.loading import load_job
from lockstep.record.diagnosis import rules
from lockstep.record.events.union import Event, Recorded
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from tests.distributed.pool import Pool
from tests.distributed.training import Document


def document(job: str, steps: int = 600, **changes: Any) -> Document:
    return {
        "job": {"use": f"tests.faulty_jobs.jobs:{job}"},
        "length": {"steps": steps},
        "batch": {"global": 16, "micro": 16},
        "evaluate": {"every": {"steps": 100}},
        "rehearsal": "off",
        "record": {"observe_every": 20, "digest_every": None},
        **changes,
    }


def shown(spec: Document) -> list[str]:
    """The rules that speak of a run."""
    rows: list[Recorded] = []

    def tell(event: Event) -> None:
        if isinstance(event, StepRow | EvaluationRow | Observation):
            rows.append(event)

    loaded = load_spec(spec)
    fit(loaded, load_job(loaded.job.use, {}), Group.join(torch.device("cpu")), tell, NoRequests())
    assert rows
    return [found.rule for found in rules.of(rows)]


def slow(name: str, job: str, **changes: Any) -> Any:
    return pytest.param(name, document(job, **changes), id=name.replace(" ", "-"), marks=pytest.mark.exact)


FAULTS = [
    pytest.param("dead units", document("DeadUnits", steps=120), id="dead-units"),
    pytest.param("precision", document("Offset", steps=80, precision="bf16"), id="precision"),
    slow("dead units", "DeadUnits"),
    slow("rate too low", "Sound", optimizer={"name": "adamw", "lr": 1e-9}),
    slow("rate too high", "SoundRegression", optimizer={"name": "adamw", "lr": 1.0}),
    slow("loss does not move", "Standing"),
    slow("waits for data", "Slow", length={"steps": 150}),
    slow("loss spike", "Outlier", clip_norm=1.0),
    slow("overfitting", "Memorised", optimizer={"name": "adamw", "lr": 1e-2}, length={"steps": 800}),
    slow("evaluation differs", "HeldOutUnscaled", evaluate={"every": {"steps": 8}}, length={"steps": 100}),
    slow("plateau", "Sound", schedule={"name": "step", "every": 200, "gamma": 1e-5}, length={"steps": 800}),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("fault", "spec"), FAULTS)
def test_a_fault_is_named_and_nothing_else_is(pool: Pool, fault: str, spec: Document) -> None:
    assert pool.run(1, shown, spec) == [[fault]]


@pytest.mark.parametrize(
    ("job", "steps", "precision"),
    [
        ("Sound", 120, "fp32"),
        *(
            pytest.param(job, 1000, precision, marks=pytest.mark.exact)
            for job in ("Sound", "SoundRegression", "SoundZeroStart", "SoundTied")
            for precision in ("fp32", "bf16", "fp16")
        ),
    ],
)
def test_sound_jobs_say_nothing(pool: Pool, job: str, steps: int, precision: str) -> None:
    assert pool.run(1, shown, document(job, steps=steps, precision=precision)) == [[]]
