"""The first trial of a sweep is prepared before the sweep begins: a fault of the machine that it meets there is tried again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep import problems
from lockstep.driver.signals import StopSignal
from lockstep.errors import JobError
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps.first_trial import first_trial
from lockstep.training import problems as training_problems
from tests.raised import raises

AGAIN = "give the command again"


class Stop(StopSignal):
    """Notes the pauses, and waits for none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses_s: list[float] = []

    def wait(self, seconds: float) -> None:
        self.pauses_s.append(seconds)


def sweep_of(folder: Path, *planted: str, **changes: Any) -> SweepSpec:
    for name in planted:
        (folder / name).touch()
    spec = {
        "job": {
            "use": "tests.chaos.exposed:ExposedDigits",
            "params": {"width": 4, "faults": str(folder)},
        },
        "length": {"epochs": 2},
        "batch": {"global": 256, "micro": 64},
        "checkpoint": {"storage": str(folder / "runs")},
        "record": {"uri": "off"},
        **changes,
    }
    return load_sweep({"spec": spec, "space": {"optimizer.lr": {"grid": [0.1, 0.01]}}})


def prepared(spec: SweepSpec, stop: StopSignal, told: list[str]) -> dict[str, int]:
    return first_trial(spec, None, gpu=False, stop=stop, say=told.append, then=AGAIN)


def test_a_fault_of_the_machine_is_told_and_tried_again(tmp_path: Path) -> None:
    """Faults as a worker would outlive them, one after the other."""
    undisturbed = prepared(sweep_of(tmp_path), Stop(), [])
    stop, told = Stop(), list[str]()
    assert prepared(sweep_of(tmp_path, "nccl", "enospc", "memory"), stop, told) == undisturbed
    assert undisturbed["total_steps"] > 0
    assert len(told) == 3
    assert told[0].startswith(
        "warning: the first trial could not be prepared: a disk or quota is full (first"
    )
    assert told[0].endswith("; it is tried again in 4 s")
    assert "NCCL failed" in "".join(told)
    assert stop.pauses_s == [4.0, 1.0, 2.0]


def test_a_fault_that_stays_ends_the_sweep_with_what_to_do(tmp_path: Path) -> None:
    told = list[str]()
    faults = {"max_worker_failures": 1}
    with raises(problems.PEER_FAILED, what="NCCL failed", kind="RuntimeError") as raised:
        prepared(sweep_of(tmp_path, "enospc", "nccl", faults=faults), Stop(), told)
    assert str(raised.value).endswith(
        " (the first trial could not be prepared in 2 tries; faults.max_worker_failures is 1; give the command again)"
    )
    assert len(told) == 1


def test_a_disk_that_stays_full_ends_it_as_a_failure_of_storage(tmp_path: Path) -> None:
    with raises(problems.STORAGE_FAILED, what="a disk or quota is full") as raised:
        prepared(sweep_of(tmp_path, "enospc", faults={"max_worker_failures": 0}), Stop(), [])
    assert " in 1 try; faults.max_worker_failures is 0" in str(raised.value)


def test_a_signal_ends_the_tries(tmp_path: Path) -> None:
    stop = Stop()
    stop.ask()
    with raises(problems.PEER_FAILED, what="NCCL failed") as raised:
        prepared(sweep_of(tmp_path, "nccl"), stop, [])
    assert str(raised.value).endswith("prematurely."), "nothing is told of tries"


@pytest.mark.scenario
def test_without_a_gpu_for_the_trials_the_first_is_prepared_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's machine may have a GPU that the spec, or the cluster, gives to no worker."""
    expected = prepared(sweep_of(tmp_path), Stop(), [])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for each in (0, "auto"):
        assert prepared(sweep_of(tmp_path, workers={"gpus_each": each}), Stop(), []) == expected


def test_a_mistake_is_told_at_once(tmp_path: Path) -> None:
    told = list[str]()
    with pytest.raises(JobError, match="a label is out of range"):
        prepared(
            sweep_of(
                tmp_path, job={"use": "tests.cluster.broken_jobs:LabelsOutOfRange", "params": {"width": 4}}
            ),
            Stop(),
            told,
        )
    lost = raises(training_problems.NO_METRIC, field="metric", got="eval/lost")
    with lost as raised:
        prepared(sweep_of(tmp_path).model_copy(update={"metric": "eval/lost"}), Stop(), told)
    assert raised.value.field == "metric"
    assert "keep_best" not in f"{raised.value} {raised.value.evidence} {raised.value.remedy}"
    assert told == []
