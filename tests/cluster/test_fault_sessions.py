"""Sessions of faults: one loss after another, at awkward moments, faster than a run can recover. It makes progress, or says why not."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import train
from lockstep.errors import ClusterError
from lockstep.record.events.union import TimeSpent
from lockstep.record.ledger.journal import Journal
from tests.cluster.test_ray_train import columns
from tests.cluster.test_supervisor import accounts, spec
from tests.processes import named

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


class Storm(threading.Thread):
    """Kills a worker every so many seconds, wherever the run is, for so many seconds from the first kill on."""

    def __init__(self, every_s: float, for_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.every_s, self.for_s, self.random = every_s, for_s, random.Random(seed)
        self.killed = 0
        self.over = threading.Event()

    def run(self) -> None:
        began: float | None = None
        while not self.over.is_set() and (began is None or time.monotonic() < began + self.for_s):
            alive = sorted(
                (*named("RayTrainWorker"), *named("JoiningWorker")), key=lambda process: process.pid
            )
            if not alive:
                self.over.wait(0.05)
                continue
            with suppress(psutil.NoSuchProcess):
                self.random.choice(alive).kill()
                self.killed += 1
                began = began or time.monotonic()
            self.over.wait(self.every_s)


@pytest.mark.scenario
def test_a_storm_that_does_not_end_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    """A worker every two seconds: no attempt comes to a checkpoint. The error says so, and what ended the last attempt; the record says it too."""
    storm = Storm(2.0, 600.0, seed=1)
    storm.start()
    try:
        with pytest.raises(ClusterError) as error:
            train(spec(tmp_path, faults={"max_worker_failures": 2}, length={"epochs": 200}))
    finally:
        storm.over.set()
        storm.join()
    text = str(error.value)
    assert "3 attempts in a row ended without a new checkpoint; faults.max_worker_failures is 2" in text
    cause, _, _ = text.partition(" (attempt ")
    assert "was lost" in cause
    assert not cause.endswith((":", ": ", "no message")), cause
    assert "connection error code 2" in cause or "has died" in cause, cause


@pytest.mark.exact  # a minute and more
def test_a_run_goes_on_after_a_storm_with_the_same_bits(tmp_path: Path) -> None:
    """A worker every three seconds for half a minute, in starts, steps and joins alike."""
    changes = {"workers": {"min": 1, "max": 3}, "length": {"epochs": 40}}
    storm = Storm(3.0, 30.0, seed=2)
    storm.start()
    try:
        result = train(spec(tmp_path, **changes, faults={"max_worker_failures": 50}))
    finally:
        storm.over.set()
        storm.join()
    assert storm.killed > 3
    why = [account["why"] for account in accounts(result)]
    assert why[-1] == "finished"
    assert all(why)
    events = Journal(Path(result.folder), read_only=True).events
    (spent,) = [event for event in events if isinstance(event, TimeSpent)]
    assert spent.interruptions >= 1
    assert spent.lost_s > 0
    whole = train(spec(tmp_path / "whole", **changes), local=True)
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)


@pytest.mark.thinned(3)
@pytest.mark.scenario
@pytest.mark.parametrize("at", ["evaluation", "save", "join"])
def test_a_loss_at_an_awkward_moment_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr("lockstep.attempts.resizing.REFILL_S", 1.0)
    file = tmp_path / "killed"
    params: dict[str, Any] = {"width": 4, "pause_s": 0.05, "at": at, "file": str(file)}
    job = {"use": "tests.cluster.broken_jobs:KilledOnce", "params": params}
    changes = {"workers": {"min": 1, "max": 3}, "length": {"epochs": 12}}
    storm = Storm(1000.0, 1.0, seed=3)  # one kill, so that a worker joins

    def once_it_saves() -> None:
        while not list(tmp_path.glob("runs/*/step-*/manifest.json")):
            time.sleep(0.05)
        storm.start()

    if at == "join":
        threading.Thread(target=once_it_saves, daemon=True).start()
    result = train(spec(tmp_path, job=job, **changes))
    storm.over.set()
    assert file.exists(), "nobody was killed at that moment"
    assert result.attempts > 1
    assert all(account["why"] for account in accounts(result))
    whole = train(
        spec(tmp_path / "whole", job={**job, "params": {**params, "at": "", "pause_s": 0.0}}, **changes),
        local=True,
    )
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)
