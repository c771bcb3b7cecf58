"""`lockstep bench`: its processes, its arithmetic and its answers. What they train is compared in tests/distributed/test_bench.py."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lockstep.calls.checking import bench_spec
from lockstep.checks import bench_worker, processes
from lockstep.checks.bench import PARTS, BenchResult, Speed, bench, first_difference
from lockstep.checks.bench_worker import StepTimes
from lockstep.checks.processes import Ended, Process, first_failure, run_together
from lockstep.errors import LockstepError, SpecError
from lockstep.spec.loading import load_spec
from tests.distributed.small_jobs import Plain
from tests.forked import Forked
from tests.in_process import here


class OnRankOne(Plain):
    """Breaks on rank 1 alone, before the workers have met in a step."""

    def model(self) -> nn.Module:
        if os.environ["POOL_RANK"] == "1":
            raise ValueError("no model here")
        return super().model()


def document(job: str, **more: Any) -> dict[str, Any]:
    return {
        "job": {"use": job if ":" in job else f"tests.distributed.small_jobs:{job}"},
        "batch": {"global": 16, "micro": 4},
        "length": {"epochs": 1},
        "record": {"uri": "off"},
        **more,
    }


def forked(request: str, environment: Mapping[str, str]) -> Process:
    """A worker in a process that has the slow imports behind it; the names of its rank are kept from a job, but for this one."""
    return Forked(_worker, request, env={**environment, "POOL_RANK": environment["LOCAL_RANK"]})


def _worker(request: str) -> None:
    raise SystemExit(bench_worker.measure(request))


def test_the_line_of_a_worker_that_fails_is_told_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for rank 1, which never comes."""
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    began = time.monotonic()
    with pytest.raises(LockstepError, match="no model here"):
        bench(load_spec(document(f"{__name__}:OnRankOne")), [2], 1, start=forked)
    assert time.monotonic() - began < 120


def speed(workers: int, losses: tuple[str, ...], digests: tuple[str, ...], *taken: float) -> Speed:
    return Speed(workers, 1.0, StepTimes(*(taken or (0.0, 1.0, 0.0, 0.0))), losses, digests, "cpu")


def test_the_first_difference_is_a_loss_or_the_weights_of_a_rank() -> None:
    one = speed(1, ("0x1p+0", "0x1p+1"), ("a",))
    assert first_difference([one, speed(2, one.losses, ("a", "a"))]) == ""
    other = first_difference([one, speed(2, ("0x1p+0", "0x1.8p+1"), ("b", "b"))])
    assert other == "step 2: the loss is 2.0 on 1 and 3.0 on 2 workers"
    assert "rank 1 of 2 workers" in first_difference([one, speed(2, one.losses, ("a", "b"))])


def test_what_a_part_takes_more_of_all_workers_is_lost_to_it() -> None:
    found = BenchResult(
        1,
        [speed(1, (), ("a",), 1.0, 6.0, 0.0, 1.0), speed(2, (), ("a", "a"), 0.5, 3.0, 1.0, 0.5)],
        True,
        "",
        2,
    )
    lost = found.lost(found.speeds[1])
    assert lost == {"data": 0.0, "compute": 0.0, "reduction": 0.2, "rest": 0.0}
    assert tuple(lost) == PARTS


def test_the_failure_that_is_told_is_that_of_who_failed_first() -> None:
    ended = [Ended(0, ""), Ended(processes.LOST, "lost"), Ended(-9, ""), Ended(1, "why")]
    assert first_failure(ended) == Ended(1, "why")
    assert first_failure(ended[:3]) == Ended(processes.LOST, "lost")
    assert first_failure(ended[:1]) is None


def test_who_waits_for_one_that_failed_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    ended = run_together([lambda: Forked(time.sleep, 600), lambda: Forked(_fail)])
    assert [one.code for one in ended] == [-9, 1]
    assert ended[1].said == "why"


def _fail() -> None:
    raise SystemExit("why")


@pytest.mark.parametrize(
    ("workers", "steps", "told"),
    [
        ([1, 8], 3, "a step has 4 micro-batches"),
        ([0], 3, "workers: got 0, wanted different whole numbers"),
        ([2, 2], 3, "workers: got 2, 2"),
        ([1], 0, "steps: got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(workers: list[int], steps: int, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        bench(load_spec(document("Plain")), workers, steps, start=forked)


def test_a_cluster_that_a_run_would_join_is_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    with pytest.raises(SpecError, match=r"the cluster at 10.0.0.5:6379.*give --local"):
        bench_spec(document("Plain"), [1])


# --- the command ------------------------------------------------------------------------------------------


@pytest.mark.scenario
def test_the_command_answers_with_an_object_and_a_figure_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def start(request: str, environment: Mapping[str, str]) -> Process:
        asked.append(json.loads(request))
        return forked(request, environment)

    monkeypatch.setattr("lockstep.checks.bench.start_python", start)
    (tmp_path / "spec.yaml").write_text(json.dumps(document("Plain")))
    words = ("--local", "--steps", "1", "--workers", "1,2", "--json", "--plot", str(tmp_path))
    code, out, _ = here(monkeypatch, capfd, tmp_path, "bench", "spec.yaml", *words)
    told = json.loads(out)
    assert code == 0
    assert (told["same_bits"], told["first_difference"], told["steps"]) == (True, None, 1)
    assert [run["workers"] for run in told["runs"]] == [1, 2]
    parts = {f"{part}_s" for part in PARTS}
    assert {"samples_per_s", "efficiency", "step_s", "lost", *parts} <= told["runs"][1].keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.svg", "spec.yaml"]
    assert "<svg" in (tmp_path / "bench.svg").read_text()
    assert [(one["rank"], one["ranks"]) for one in asked] == [(0, 1), (0, 2), (1, 2)]
    assert not any(Path(one["out"]).exists() for one in asked)


@pytest.mark.exact
def test_other_bits_are_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.checks.bench.start_python", forked)
    (tmp_path / "spec.yaml").write_text(json.dumps(document("Counting")))
    words = ("--local", "--steps", "1", "--workers", "2,1")
    code, out, err = here(monkeypatch, capfd, tmp_path, "bench", "spec.yaml", *words)
    assert code == 1
    assert "different: step 1" in out
    assert "1 step on 2 workers" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--workers", "1,x"), "workers: got '1,x'"),
        (("--plot", "speed.pdf"), "plot: got 'speed.pdf'"),
        (("--plot", "nowhere/speed.svg"), "plot: there is no folder 'nowhere'"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "spec.yaml").write_text(json.dumps(document("Plain")))
    code, out, err = here(monkeypatch, capfd, tmp_path, "bench", "spec.yaml", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


@pytest.mark.exact
def test_new_interpreters_and_three_workers() -> None:
    """As a user has it: the digits."""
    spec = load_spec("jobs/digits/train.yaml", ["job.params.width=4", "record.uri=off"])
    found = bench(spec, [1, 3], 2)
    assert found.same_bits is True
    assert [len(one.digests) for one in found.speeds] == [1, 3]
