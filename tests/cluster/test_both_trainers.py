"""The same run with Ray Train's controller in the driver, and through Ray's public TorchTrainer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import train
from lockstep.clusters.ray_internals import PUBLIC_ONLY
from lockstep.driver.result import Result
from tests.cluster.test_ray_train import columns
from tests.cluster.test_supervisor import accounts, spec, workers
from tests.processes import named

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


@pytest.fixture
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(PUBLIC_ONLY, str(int(request.param == "public")))
    yield request.param


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The uninterrupted run, in one plain process."""
    return train(spec(tmp_path_factory.mktemp("whole"), length={"epochs": 4}), local=True)


def mailboxes() -> list[psutil.Process]:
    return named("Mailbox")


def kill(found: list[Callable[[], list[psutil.Process]]], folder: Path, killed: list[str]) -> None:
    """One of each kind of process, as soon as another checkpoint is there."""
    seen = 0
    for find in found:
        saved: list[Path] = []
        while len(saved) <= seen or not find():
            saved = list(folder.glob("runs/*/step-*/manifest.json"))
            time.sleep(0.05)
        victim = find()[-1]
        killed.append(victim.cmdline()[0])
        victim.kill()
        seen = len(saved) + 1


# The workers of a lost mailbox are ended from the driver, for which the public trainer has no call.
@pytest.mark.parametrize(
    ("trainer", "found"),
    [
        pytest.param("public", [workers], marks=pytest.mark.scenario, id="public-worker"),
        *(  # test_supervisor.py loses a mailbox and a worker under the driver
            pytest.param(trainer, found, marks=pytest.mark.exact, id=f"{trainer}-{name}")
            for trainer in ("public", "driver")
            for name, found in (("mailbox", [mailboxes]), ("worker-mailbox", [workers, mailboxes]))
        ),
    ],
    indirect=["trainer"],
)
def test_what_is_killed_costs_an_attempt_and_no_bit(
    trainer: str, tmp_path: Path, whole: Result, found: list[Callable[[], list[psutil.Process]]]
) -> None:
    """G1, G4."""
    killed: list[str] = []
    thread = threading.Thread(target=kill, args=(found, tmp_path, killed), daemon=True)
    thread.start()
    changes = {"workers": {"min": 2, "max": 2}, "checkpoint": {"storage": str(tmp_path / "runs"), "every": {"steps": 4}, "keep_last": 100}}  # fmt: skip
    result = train(spec(tmp_path, **changes))
    assert len(killed) == len(found)
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)
    *lost, last = accounts(result)
    assert len(lost) == len(found)
    for find, attempt in zip(found, lost, strict=True):
        why = attempt["why"]
        assert "mailbox was lost" in why if find is mailboxes else "lost" in why or "cannot be reached" in why
    assert last["why"] == "finished"
    public = [text for text in result.warnings if "public TorchTrainer" in text]
    assert len(public) == (trainer == "public")
    assert ("placement" in last["seconds"]) == (trainer == "driver")  # it went the way that was asked for


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("reduction", "goes_on"),
    [
        ("exact", True),
        pytest.param("native", False, marks=pytest.mark.exact, id="control"),  # on fewer workers: another run
    ],
)
def test_through_rays_public_trainer_the_others_go_on_and_the_worker_that_ray_starts_anew_joins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reduction: str, goes_on: bool
) -> None:
    """G1, G4. The two others are the same processes throughout, and Ray's controller ends with all three."""
    monkeypatch.setenv(PUBLIC_ONLY, "1")
    job = {"use": "tests.cluster.broken_jobs:SlowDigits", "params": {"width": 4, "pause_s": 0.1}}
    changes = {"job": job, "length": {"steps": 150}, "workers": {"min": 1, "max": 3}, "reduction": reduction}
    quick = {**changes, "job": {**job, "params": {"width": 4}}}
    # The native reduction's bits depend on the number of workers.
    expected = train(spec(tmp_path / "whole", **quick), local=True) if goes_on else None
    before, after = list[int](), list[int]()

    def kill_one() -> None:
        while not list(tmp_path.glob("runs/*/step-*/manifest.json")):
            time.sleep(0.05)
        before.extend(process.pid for process in workers())
        psutil.Process(before[0]).kill()
        while not list(tmp_path.glob("runs/*/attempts.json")) and not over.is_set():
            time.sleep(0.05)
        while len(accounts_so_far(tmp_path)) < 3:
            if over.wait(0.05):
                return
        after.extend(process.pid for process in workers())

    over = threading.Event()
    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    result = train(spec(tmp_path, **changes))
    over.set()
    thread.join()
    found = accounts(result)
    if not goes_on:
        assert not any(account["in_memory"] for account in found)
        return
    assert [(one["workers"], one["in_memory"], one["joined"], one["repeated"]) for one in found] == [
        (3, False, 0, 0),
        (2, True, 0, 0),
        (3, True, 1, 0),
    ]
    assert set(before[1:]) < set(after)
    assert len(after) == 3
    assert found[0]["why"].startswith("rank ")
    assert found[1]["why"] == "Ray has replaced a lost worker"
    assert expected is not None
    assert result.weights_digest == expected.weights_digest
    assert columns(result) == columns(expected)
    assert result.metrics == expected.metrics


def accounts_so_far(folder: Path) -> list[dict[str, Any]]:
    """The attempts of the run in progress; none while its file is being written."""
    (path,) = folder.glob("runs/*/attempts.json")
    with suppress(ValueError):
        found: list[dict[str, Any]] = json.loads(path.read_text())
        return found
    return []
