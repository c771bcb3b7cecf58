"""What a driver restarter starts again, and what it leaves as it is; tests/cluster/test_local_cluster.py has it on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.clusters import problems
from lockstep.clusters.driver_restarter import (
    JOB,
    KEPT,
    first_job,
    first_of,
    kept,
    pause_s,
    refuse_without_a_job,
    retries_so_far,
    retry_of,
    was_lost,
)
from lockstep.clusters.submission import RETRIES, entrypoint
from lockstep.errors import ClusterError, JobError
from lockstep.exit_codes import ExitCode
from tests.raised import raises


@pytest.mark.parametrize("code", [-9, 137, None, -6, ExitCode.MAY_PASS])
def test_a_run_that_did_not_end_itself_was_lost(code: int | None) -> None:
    """SIGKILL to the driver or to its shell, no exit code where the job's own process is gone, a crash, a reason that may pass."""
    assert was_lost("FAILED", code)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("SUCCEEDED", 0),
        ("FAILED", 1),
        ("FAILED", 2),
        ("FAILED", 130),
        ("FAILED", 143),
        ("STOPPED", None),
        ("STOPPED", -9),
        ("RUNNING", None),
        ("PENDING", None),
    ],
)
def test_what_a_run_decided_is_left_as_it_is(status: str, code: int | None) -> None:
    """Finished, a mistake of the job or the spec, a signal, `ray job stop` (also where Ray had to kill), and what still runs."""
    assert not was_lost(status, code)


def test_retries_are_counted_by_the_jobs_that_there_are() -> None:
    jobs = ["night-1a", "night-1a-retry-1", "night-1a-retry-2", "other", None]
    assert retries_so_far("night-1a", jobs) == 2
    assert retries_so_far("other", jobs) == 0
    assert retry_of("other", 0) == "other"
    assert first_of("night-1a-retry-12") == first_of("night-1a") == "night-1a"


def test_pauses_grow_and_are_bounded() -> None:
    assert [pause_s(retry) for retry in (1, 2, 3, 100)] == [1.0, 2.0, 4.0, 60.0]


def test_a_submitted_run_is_asked_to_keep_itself(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").touch()
    words = entrypoint("spec.yaml", ["seed=1"], "night", tmp_path, 3)
    assert words[-5:] == ["--run", "night", "--retries", "3", "seed=1"]
    found = RETRIES.search(" ".join(words))
    assert found is not None
    assert found[1] == "3"
    assert "--retries" not in entrypoint("spec.yaml", [], "night", tmp_path)


def test_a_command_that_is_no_job_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (JOB, KEPT):
        monkeypatch.delenv(name, raising=False)
    with raises(problems.NO_JOB_TO_RETRY):
        refuse_without_a_job("local")
    refuse_without_a_job("127.0.0.1:1")  # whether it is one, the cluster says


def test_the_first_job_of_a_run_is_the_one_that_was_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB, "night-1a")
    assert first_job() == "night-1a"
    refuse_without_a_job("local")
    monkeypatch.setenv(JOB, "night-1a-retry-1")
    monkeypatch.setenv(KEPT, "night-1a")
    assert first_job() == "night-1a"


def test_without_retries_errors_keep_their_exit_code() -> None:
    for error in (ClusterError("gone"), JobError("wrong")):
        with pytest.raises(type(error)) as raised, kept(0, lambda text: None):
            raise error
        assert raised.value.exit_code == 1
