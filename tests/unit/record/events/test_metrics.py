from __future__ import annotations

import posixpath
import re

from hypothesis import given
from hypothesis import strategies as st

from lockstep.record.events.metrics import evaluation_points, step_points, store_key, system_points
from lockstep.record.events.union import Sampled
from tests.unit.record.rows import evaluation_row, step_row

NAMES = st.text(alphabet=st.sampled_from("ab@%[]:/._ -é\n"), max_size=12) | st.text(max_size=300)


@given(NAMES)
def test_every_name_becomes_a_key_that_mlflow_takes(name: str) -> None:
    key = store_key(name)
    assert re.fullmatch(r"[/\w.\- :]*", key)
    assert len(key) <= 250
    assert posixpath.normpath(key) == key
    assert key != "."
    assert not key.startswith(("..", "/"))


@given(NAMES, NAMES)
def test_no_two_names_share_a_key(one: str, other: str) -> None:
    assert (store_key(one) == store_key(other)) == (one == other)


def test_usual_names_stay_as_they_are() -> None:
    for name in ("train/loss", "eval/top-5 accuracy", "perf/step_s", "optimizer.lr"):
        assert store_key(name) == name
    assert store_key("eval/accuracy@5") == "eval/accuracy:40:5"


def test_a_step_has_its_own_number_and_time_whenever_it_is_written() -> None:
    points = list(step_points(step_row(3), step_row(2), scaled=False))
    assert {(p.step, p.timestamp_ms) for p in points} == {(3, 1_700_000_003_123)}
    values = {p.key: p.value for p in points}
    assert values == {
        "train/loss": 0.2,
        "train/entropy": 3 / 7,
        "train/lr": 1e-3 / 3,
        "train/grad_norm": 3**0.5,
        "train/clipped_norm": 1.0,
        "perf/step_s": 0.01,
        "perf/data_wait_s": 0.001,
        "perf/samples_per_s": 6400.0,
    }


def test_scale_and_skipped_are_points_only_where_a_scaler_runs() -> None:
    values = {
        p.key: p.value for p in step_points(step_row(1, scale=65536.0, skipped=True), None, scaled=True)
    }
    assert (values["train/scale"], values["train/skipped"]) == (65536.0, 1.0)


def test_samples_per_second_is_left_out_where_the_step_before_is_unknown() -> None:
    assert "perf/samples_per_s" not in {p.key for p in step_points(step_row(7), step_row(3), scaled=False)}


def test_a_part_never_takes_the_place_of_a_fixed_name() -> None:
    points = [
        p for p in step_points(step_row(1, parts={"loss": 9.0}), None, scaled=False) if p.key == "train/loss"
    ]
    assert [p.value for p in points] == [1 / 3]


def test_an_evaluation_keeps_the_names_that_it_has() -> None:
    keys = {p.key for p in evaluation_points(evaluation_row(4, loss=1.0, accuracy=0.5))}
    assert keys == {"eval/loss", "eval/accuracy", "perf/evaluation_s"}


def test_a_sample_of_a_node_from_before_the_run_began_is_no_point() -> None:
    """Several of them would all be at second 0, where each metric has one value a step."""
    before, after = (Sampled("node-0", at, {"cpu_utilization_percentage": 12.5}) for at in (99.9, 110.2))
    assert list(system_points(before, 100.0)) == []
    ((key, value, timestamp_ms, step),) = system_points(after, 100.0)
    assert (key, value, timestamp_ms, step) == (
        "system/node-0/cpu_utilization_percentage",
        12.5,
        110_200,
        10,
    )
