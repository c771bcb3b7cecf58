"""What a run looks at while it trains: one value for every number of workers, and the run's bits stay as they are (G1)."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.record.diagnosis.rules import GRAPH_KEPT
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, bits, train


def document(**changes: Any) -> Document:
    return {
        "job": {"use": "tests.distributed.small_jobs:Words", "params": {"samples": 40}},
        "batch": {"global": 16, "micro": 2},
        "length": {"epochs": 2},
        "data": {"drop_last": False},
        "clip_norm": 1.0,
        "workers": {"bucket_mb": 0.001},
        "record": {"observe_every": 2, "digest_every": None},
        **changes,
    }


def layers(run: Trained) -> list[tuple[int, Any]]:
    """The deterministic part of the observations, with every bit."""
    return [
        (row.step, bits({name: value for name, value in row.values.items() if name.startswith("layers/")}))
        for row in run.observations
    ]


@pytest.mark.scenario
@pytest.mark.parametrize(
    "workers", [2, pytest.param(3, marks=pytest.mark.exact), pytest.param(4, marks=pytest.mark.exact)]
)
def test_gradient_flow_is_the_same_bits_for_every_number_of_workers(pool: Pool, workers: int) -> None:
    """Ragged and clipped steps among them. A control: native sums are added in another order, and it shows.

    Not on four workers, whose native sums of two micro-batches each are nodes of the tree.
    """
    (alone,) = pool.run(1, train, document())
    several, *others = pool.run(workers, train, document())
    assert [step for step, _ in layers(alone)] == [1, 2, 4, 6]
    assert all(values for _, values in layers(alone))
    assert layers(several) == layers(alone)
    assert [layers(other) for other in others] == [[]] * (workers - 1)
    native = pool.run(min(workers, 3), train, document(reduction="native"))[0]
    assert layers(native) != layers(alone)


@pytest.mark.scenario
@pytest.mark.parametrize(
    "precision",
    ["bf16", pytest.param("fp32", marks=pytest.mark.exact), pytest.param("fp16", marks=pytest.mark.exact)],
)
def test_a_run_that_is_not_watched_has_the_same_bits(pool: Pool, precision: str) -> None:
    """Nor does the comparison with fp32 show in them, which is made by rank 0 alone; what it comes to is the same on two workers."""
    given = document(precision=precision)
    watched, _ = pool.run(2, train, given)
    (alone,) = pool.run(1, train, {**given, "record": {"observe_every": None, "digest_every": None}})
    assert alone == watched
    assert alone.observations == ()
    if precision != "fp32":
        (one,) = pool.run(1, train, given)
        assert [step for step, _ in compared(watched)] == [2, 4]
        assert compared(one) == compared(watched)


def compared(run: Trained) -> list[tuple[int, Any]]:
    """What the gradient of a micro-batch differs by from that in fp32, with every bit."""
    named = [
        (row.step, {name: value for name, value in row.values.items() if name.endswith("_difference")})
        for row in run.observations
    ]
    return [(step, bits(values)) for step, values in named if values]


def test_a_job_that_cannot_be_computed_in_fp32_says_so_once(pool: Pool) -> None:
    given = document(
        job={"use": "tests.faulty_jobs.jobs:ShortByHand"},
        batch={"global": 16, "micro": 8},
        length={"steps": 8},
    )
    (run,) = pool.run(1, train, {**given, "precision": "bf16", "data": {}})
    (told,) = [text for text in run.warnings if "is not compared with fp32" in text]
    assert "must have the same dtype" in told
    assert compared(run) == []
    assert len(run.steps) == 8


def hoarding(keeps: str) -> Document:
    return document(
        job={
            "use": "tests.distributed.small_jobs:Hoarding",
            "params": {"keeps": keeps, "width": 4096, "samples": 64},
        },
        batch={"global": 64, "micro": 32},
        length={"steps": 40},
        record={"observe_every": 4, "digest_every": None},
        rehearsal="off",
    )


@pytest.mark.scenario
def test_a_job_that_appends_what_has_a_graph_to_a_list_is_named_and_one_that_detaches_is_not(
    pool: Pool,
) -> None:
    """Once, with the list and its owner, on the rank that holds it; memory is what the process really holds."""
    (run,) = pool.run(1, train, hoarding("graphs"))
    (found,) = run.diagnosed
    assert found.rule == GRAPH_KEPT
    assert found.evidence.startswith("rank 0 held ")
    assert "the list 'kept' of an object of class 'Hoarding'" in found.evidence
    (sound,) = pool.run(1, train, hoarding("numbers"))
    assert sound.diagnosed == ()


def test_observations_say_where_the_time_goes_and_what_each_rank_holds(pool: Pool) -> None:
    first, second = pool.run(2, train, document())
    assert second.observations == ()
    row = first.observations[-1]
    assert {name for name in row.values if name.startswith("perf/memory/")} == {
        "perf/memory/rank_0_mb",
        "perf/memory/rank_1_mb",
    }
    assert row.values["perf/memory/rank_0_mb"] > 50
    spent = {name: value for name, value in row.values.items() if name.startswith("perf/time/")}
    assert min(spent.values()) >= 0.0
    steps = [one.step_s for one in first.steps[-2:]]
    assert 0.5 * min(steps) < sum(spent.values()) - spent["perf/time/checkpoint_s"] < 1.5 * max(steps)
    assert spent["perf/time/reduction_s"] + spent["perf/time/slowest_s"] > 0.0


def test_with_autocast_the_types_of_modules_are_kept_and_fp16_says_what_underflows(pool: Pool) -> None:
    (run,) = pool.run(1, train, document(precision="fp16"))
    (text,) = run.precision
    assert '"float16"' in text
    assert {"fp16/scale", "fp16/underflow"} <= set(run.observations[0].values)
    (plain,) = pool.run(1, train, document())
    assert plain.precision == ()
