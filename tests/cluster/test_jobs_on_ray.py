"""G1 on Ray for jobs of several kinds: one value of every bit and metric for any number of workers, with loader processes, and after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep import train
from lockstep.driver.result import Result
from tests.cluster import shipped
from tests.cluster.disturbed_jobs import FALLS_AFTER
from tests.cluster.test_ray_train import columns
from tests.cluster.test_supervisor import accounts
from tests.distributed.training import bits

pytestmark = [
    pytest.mark.exact,  # minutes; test_ray_train.py and test_supervisor.py have a job without and one with a kill
    pytest.mark.usefixtures("cluster"),
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]

KINDS = {
    "hf/gpt": "Language",
    "images": "Pictures",
    "tar shards": "Shards",
    "phases in fp16": "Phases",
}
"""The class of `disturbed_jobs` by the name of the document whose spec it takes over."""


class Run:
    """A kind of job with its data in a folder, and what it comes to in one plain process."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._given = shipped.document(kind, folder)
        self._given["job"]["use"] = f"tests.cluster.disturbed_jobs:{KINDS[kind]}"
        self.whole = self.on(folder, local=True)

    def on(
        self, folder: Path, *, local: bool = False, workers: int = 1, loaders: int = 0, **params: Any
    ) -> Result:
        """The run with its checkpoints in a folder of its own; `params` disturb it."""
        job, given = self._given["job"], self._given
        more = {
            "job": {**job, "params": {**job.get("params", {}), **params}},
            "workers": {"min": 1, "max": workers},
            "data": {**given.get("data", {}), "drop_last": False, "loader_processes": loaders},
            "checkpoint": {**given["checkpoint"], "storage": str(folder / "runs")},
        }
        return train({**given, **more}, local=local)


class Runs(dict[str, Run]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, kind: str) -> Run:
        folder = self.folder / kind.replace(" ", "-").replace("/", "-")
        folder.mkdir()
        self[kind] = Run(kind, folder)
        return self[kind]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("jobs"))


def assert_same(there: Result, whole: Result) -> None:
    assert there.weights_digest == whole.weights_digest
    assert there.identity == whole.identity
    assert bits(there.metrics) == bits(whole.metrics)  # a loss that overflowed is no number
    assert columns(there) == columns(whole)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_loader_processes_change_no_bit(
    runs: Runs, tmp_path: Path, kind: str, workers: int
) -> None:
    there = runs[kind].on(tmp_path, workers=workers, loaders=2)
    assert (there.workers, there.attempts) == (workers, 1)
    assert_same(there, runs[kind].whole)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_killed_in_mid_step_changes_no_bit(
    runs: Runs, tmp_path: Path, kind: str, workers: int
) -> None:
    """By SIGKILL, in the second micro-batch of a step, and where there are phases in that of the second, with loader processes.

    The others go on from the state that they hold, and where nobody is left, from a checkpoint.
    """
    there = runs[kind].on(tmp_path, workers=workers, loaders=1, fall=str(tmp_path / "fallen"))
    assert (tmp_path / "fallen").exists()
    first, second = accounts(there)
    assert (first["workers"], first["last_step"], second["from_step"]) == (workers, FALLS_AFTER, FALLS_AFTER)
    assert second["in_memory"] is (workers > 1)
    assert_same(there, runs[kind].whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_sees_its_rank_has_other_bits_on_two_workers(
    runs: Runs, tmp_path: Path, kind: str
) -> None:
    """Negative control of the two above."""
    there, whole = runs[kind].on(tmp_path, workers=2, skewed=True), runs[kind].whole
    assert there.identity == whole.identity
    assert there.weights_digest != whole.weights_digest
    assert columns(there)[:FALLS_AFTER] == columns(whole)[:FALLS_AFTER]


def test_an_optimizer_that_forgets_has_other_bits_after_a_kill(runs: Runs, tmp_path: Path) -> None:
    """Negative control of the kill."""
    phases = runs["phases in fp16"]
    whole = phases.on(tmp_path / "whole", local=True, forgets=True)
    left_alone = phases.on(tmp_path / "left-alone", workers=2, forgets=True)
    assert_same(left_alone, whole)
    (tmp_path / "killed").mkdir()
    there = phases.on(tmp_path / "killed", workers=2, forgets=True, fall=str(tmp_path / "killed/fallen"))
    assert there.attempts == 2
    assert there.weights_digest != whole.weights_digest
