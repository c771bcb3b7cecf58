"""What a call on a run or a spec refuses before anything is trained is told as the problem that it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.calls import exporting, problems
from lockstep.calls.checking import bench_spec
from lockstep.calls.continuation import refuse_changes
from lockstep.calls.executions import execution_of
from lockstep.calls.guarding import _spec_path
from lockstep.calls.lost_storage import Known, refuse_lost
from lockstep.calls.pinning import _check_saved
from lockstep.calls.sample_removal import read_ids
from lockstep.calls.starter import init
from lockstep.calls.train import train
from lockstep.calls.ui import Ui, guarded
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.driver.options import RunOptions
from lockstep.errors import Problem
from lockstep.record.mirror.run_store import StoredRun
from lockstep.redaction_marks import marked
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from tests.raised import raises

DIGITS = "jobs/digits/train.yaml"
ENDED = StoredRun("f" * 32, "FAILED", {"job": {"use": "jobs.digits.job:Digits"}}, {}, "")


def spec(**fields: Any) -> Spec:
    return load_spec({"job": {"use": "jobs.digits.job:Digits"}, "record": {"uri": "off"}, **fields})


CALLS: list[tuple[Callable[[Path], Any], Problem[Any], dict[str, Any]]] = [
    (lambda _: train(DIGITS, takeover=True, uri="off", local=True), problems.TAKEOVER_OF_NOTHING, {}),
    (lambda _: train(DIGITS, run="a/b", uri="off", local=True), problems.RUN_NAME, {"got": "a/b"}),
    (lambda _: train(DIGITS, chaos={"worker": 0.5}, uri="off", local=True), problems.CHAOS_LOCAL, {}),
    (lambda _: refuse_changes("f00", spec(), spec(seed=7)), problems.FIELD_CHANGED, {"field": "seed", "run": "f00", "wanted": "0", "got": "7"}),
    (lambda _: refuse_changes("f00", spec(), spec(name=marked("Token"))), problems.SECRET_FIELD, {"field": "name", "run": "f00"}),
    (lambda here: read_ids(here / "nowhere"), problems.IDS_UNREADABLE, {}),
    (lambda here: read_ids(here / "words"), problems.NO_ID, {"line": 2, "got": "three"}),
    (lambda here: read_ids(here / "empty"), problems.NO_IDS, {}),
    (lambda here: _spec_path(here / "empty", here / "below", here), problems.GUARD_OUTSIDE, {}),
    (lambda here: exporting.export("f" * 32, rtol=1.5, uri="off", storage=here), problems.RTOL, {"got": 1.5}),
    (lambda _: exporting._name(ENDED, best=False), problems.NO_FINAL_WEIGHTS, {"got": "FAILED"}),
    (lambda _: exporting._name(ENDED, best=True), problems.NO_BEST, {"run": ENDED.run_id}),
    (lambda here: exporting._weights(ENDED._replace(summary={"weights_digest": "00"}), here, best=False), problems.WEIGHTS_UNREADABLE, {"file": Path("weights/final.safetensors")}),
    (lambda _: init("x", "opera"), problems.STARTER_KIND, {"got": "opera"}),
    (lambda _: init(""), problems.NO_NAME, {}),
    (lambda here: init(here / "nowhere" / "x"), problems.NO_PARENT, {"folder": Path("nowhere"), "got": "x"}),
    (lambda here: init(here / "a\\b"), problems.STARTER_NAME, {"got": "a\\b"}),
    (lambda here: init(here / "empty"), problems.STARTER_EXISTS, {}),
    (lambda here: init(here / ("x" * 300)), problems.STARTER_UNWRITABLE, {"got": "File name too long"}),
    (lambda _: guarded("0.0.0.0", {}), problems.UI_WITHOUT_PASSWORD, {"got": "0.0.0.0"}),
    (lambda here: Ui(f"sqlite:///{here}/m.db", 0), problems.PORT, {"got": 0}),
]  # fmt: skip
"""A call, and what it tells; a fact that is a relative path is below the test's folder."""


@pytest.mark.parametrize(("call", "problem", "facts"), CALLS, ids=[it[1].code for it in CALLS])
def test_a_call_says_what_it_refuses(
    call: Callable[[Path], Any], problem: Problem[Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "words").write_text("1\nthree\n")
    (tmp_path / "empty").touch()
    (tmp_path / "below").mkdir()
    facts = {name: tmp_path / it if isinstance(it, Path) else it for name, it in facts.items()}
    with raises(problem, **facts) as raised:
        call(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_bench_does_not_measure_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    with raises(problems.BENCH_ON_CLUSTER, got="10.0.0.5:6379"):
        bench_spec(DIGITS, [1])


def test_weights_that_are_another_runs_or_elsewhere_are_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "named_run", lambda *_: ENDED._replace(summary={"reused_from": "e" * 32}))
    with raises(problems.REUSES, run=ENDED.run_id, owner="e" * 32):
        exporting._located_run(ENDED.run_id, "off", tmp_path)
    monkeypatch.setattr(exporting, "named_run", lambda *_: ENDED)
    with raises(problems.FOLDER_ELSEWHERE, run=ENDED.run_id):
        exporting._located_run(ENDED.run_id, "off", tmp_path)


def test_a_step_without_a_checkpoint_is_not_pinned(tmp_path: Path) -> None:
    run = RunFolder.create(open_storage(str(tmp_path)), "f00")
    with raises(problems.PIN_WITHOUT_CHECKPOINT, run="f00", got=7, wanted="none"):
        _check_saved(run, 7)


def test_a_storage_that_lost_what_the_record_knows_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is a record that knows of no checkpoint."""
    known = Known(step=7, location="in the folder 'old'")
    given = spec(checkpoint={"storage": str(tmp_path)})
    monkeypatch.setattr("lockstep.calls.lost_storage._known", lambda *_: None)
    refuse_lost(given, "f00", copies=False)
    monkeypatch.setattr("lockstep.calls.lost_storage._known", lambda *_: known)
    with raises(problems.STORAGE_LOST, run="f00", step=7, wanted=known.location, got=tmp_path):
        refuse_lost(given, "f00", copies=False)


def test_a_sandbox_holds_one_process_of_this_machine() -> None:
    run: Any = SimpleNamespace(run_id="f00", spec=spec(reduction="native"), fields={"workers": 3})
    with raises(problems.SANDBOX_ON_RAY):
        execution_of(run, RunOptions(), sandboxed=True)
    with raises(problems.SANDBOX_NATIVE, run="f00", got=3):
        execution_of(run, RunOptions(local=True), sandboxed=True)
