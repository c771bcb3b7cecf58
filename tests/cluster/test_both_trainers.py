"""The same run with Ray Train's controller in the driver, and through Ray's public TorchTrainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
