"""What a check or a measurement can be refused for is told as the problem that it is."""

from __future__ import annotations

import re
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checks import problems
from lockstep.checks.bench import check_workers
from lockstep.checks.lr_finder import lr_find
from lockstep.checks.measurement_plots import destination
from lockstep.checks.start_checks import check_storage, find_initial_weights
from lockstep.checks.tracking_store import store_answers
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from tests.distributed.small_jobs import Plain
from tests.raised import Refusal, check_refusal, each_refusal, raises


class AtRest(Plain):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0)


class NotFinite(Plain):
    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        loss = super().loss(model, batch)
        return lockstep.Loss(loss.total * float("nan"), loss.weight)


def spec_of(job: str = "tests.distributed.small_jobs:Plain", **sections: Any) -> Spec:
    return load_spec(
        {"job": {"use": job}, "batch": {"global": 16, "micro": 4}, "record": {"uri": "off"}, **sections}
    )


def stored(folder: Path, make: Callable[[Path], Any]) -> Spec:
    make(folder / "runs")
    return spec_of(checkpoint={"storage": str(folder / "runs" / "deep")})


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def no_database(folder: Path) -> str:
    """One whose log cannot be opened, as on a disk that fails."""
    with closing(sqlite3.connect(folder / "m.db")) as connection:
        connection.execute("pragma journal_mode=wal")
        connection.execute("create table experiments (name)")
    (folder / "m.db-wal").mkdir()
    return f"sqlite:///{folder / 'm.db'}"


HERE = "tests.unit.checks.test_refusals"

CALLS: list[Refusal] = [
    (lambda _: check_workers(spec_of(), [0], 3), problems.WORKER_COUNTS, {"got": "0"}),
    (lambda _: check_workers(spec_of(), [], 3), problems.WORKER_COUNTS, {"got": "none"}),
    (lambda _: check_workers(spec_of(), [2, 2], 3), problems.WORKER_COUNTS, {"got": "2, 2"}),
    (lambda _: check_workers(spec_of(), [1, 5], 3), problems.TOO_MANY_WORKERS, {"got": 5, "most": 4}),
    (lambda _: check_workers(spec_of(), [4], 0), problems.STEP_COUNT, {"got": 0}),
    (lambda here: destination(here / "speed.pdf", "bench"), problems.PLOT_FILE, {"got": re.compile("pdf$")}),
    (lambda here: destination(here / "nowhere" / "a.svg", "bench"), problems.NO_PLOT_FOLDER, {}),
    (lambda _: find_initial_weights(spec_of(initial_weights="nowhere.pt")), problems.NO_WEIGHTS, {}),
    (
        lambda here: check_storage(stored(here, lambda runs: runs.symlink_to(here / "nowhere"))),
        problems.BROKEN_LINK,
        {"field": "checkpoint.storage", "target": re.compile("nowhere$")},
    ),
    (
        lambda here: check_storage(stored(here, Path.touch)),
        problems.UNWRITABLE,
        {"field": "checkpoint.storage", "got": "Not a directory"},
    ),
    (
        lambda _: store_answers(f"http://127.0.0.1:{unused_port()}"),
        problems.SERVER_SILENT,
        {"got": "Connection refused"},
    ),
    (
        lambda _: store_answers(f"postgresql://me:secret@127.0.0.1:{unused_port()}/runs"),
        problems.DATABASE_SILENT,
        {"got": "Connection refused", "database": re.compile(r"^postgresql://[^s]*@127")},
    ),
    (lambda here: store_answers(no_database(here)), problems.NO_DATABASE, {"path": re.compile(r"m\.db$")}),
    (lambda _: lr_find(spec_of(), steps=9), problems.RATES, {"steps": 9}),
    (lambda _: lr_find(spec_of(), lowest=2.0, highest=1.0), problems.RATES, {"lowest": "2", "highest": "1"}),
    (lambda _: lr_find(spec_of(f"{HERE}:AtRest"), steps=10), problems.NO_RATE, {"got": "0"}),
    (lambda _: lr_find(spec_of(f"{HERE}:NotFinite", rehearsal="off"), steps=10), problems.FIRST_LOSS, {"rate": "1e-07"}),
]  # fmt: skip


@each_refusal(CALLS)
def test_what_cannot_be_checked_is_refused_by_name(
    refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refusal(refusal, tmp_path)


def test_more_processes_than_the_machine_has_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the spec asks for none."""
    from lockstep.checks.bench_worker import device_of

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with raises(problems.GPUS_MISSING, got=3, available=2):
        device_of(spec_of(), 3)
    assert device_of(spec_of(workers={"gpus_each": 0}), 3) == torch.device("cpu")
