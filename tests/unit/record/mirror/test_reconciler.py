"""The store gets the checkpoints that the spec says, what was measured of each, and the final model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import RecordError
from lockstep.record import problems
from lockstep.record.errors import RejectedError, UnavailableError
from lockstep.record.events.metrics import Point
from lockstep.record.events.union import CheckpointRow, Document, Finished
from lockstep.record.mirror.final_model_files import FinalModel
from lockstep.record.mirror.folder import FolderStore
from lockstep.record.mirror.run_store import Measured
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.raised import raises
from tests.unit.checkpoint.one_process import write_checkpoint
from tests.unit.checkpoint.states import state
from tests.unit.record.rows import evaluation_row, step_row
from tests.unit.record.test_recorder import wait_until

Specs = Callable[..., Spec]


class Noting(FolderStore):
    """Notes what it is sent of checkpoints and of the final model."""

    def __init__(self, storage: Path) -> None:
        super().__init__(storage, "noting")
        self.checkpoints_of: dict[int, list[str]] = {}
        self.measured: dict[int, list[float]] = {}
        self.models: list[int] = []
        self.takes_points, self.refuses = True, list[str]()

    def log_file(self, path: Path, artifact_path: str = "") -> None:
        if path.name in self.refuses:
            raise RejectedError("it is too large")

    def log_metrics(self, points: Sequence[Point]) -> None:
        if not self.takes_points:
            raise UnavailableError("it does not answer")

    def log_checkpoint(
        self,
        step: int,
        tags: Mapping[str, str],
        folder: Path | None,
        sent: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.checkpoints_of.setdefault(step, []).append("reference" if folder is None else "copy")

    def log_evaluation(self, step: int, evaluation: Sequence[Measured]) -> None:
        self.measured[step] = [of_step.point.value for of_step in evaluation]

    def log_final_model(self, folder: Path, model: Any, step: int) -> None:
        self.models.append(step)


def recorded(spec: Spec, why_no_model: str) -> tuple[Noting, Path]:
    """A run with the checkpoints of two steps, of which the second is essential: its store and its folder."""
    store = Noting(spec.folder)
    recorder = Recorder(spec, lambda _: store)
    recorder.start()
    attempt = RunFolder.create(open_storage(spec.checkpoint.storage), recorder.run_id()).claim()
    for step in (1, 2):
        write_checkpoint(attempt, step, state(step, items=4))
        uri = f"{spec.checkpoint.storage}/{recorder.run_id()}/step-{step:09d}"
        assert Path(uri).is_dir()
        save = CheckpointRow(step, uri, None, 1, 0.0, 0.0, 0.0, 1.0, (), ((step, uri),))
        recorder.tell(step_row(step), evaluation_row(step), save)
    (folder := recorder.run_folder() / "model").mkdir()
    recorder.tell(Finished({"step": 2}, [FinalModel(error=why_no_model).write(folder)]))
    recorder.close(timeout_s=20.0)
    return store, recorder.run_folder()


@pytest.mark.parametrize("uri", ["off", "sqlite:///unused.db"])
def test_each_checkpoint_is_sent_as_the_spec_says_with_what_was_measured_of_it(spec: Specs, uri: str) -> None:
    store, _ = recorded(spec(uri), "")
    assert store.checkpoints_of.pop(2)[-1] == ("reference" if uri == "off" else "copy")
    assert store.checkpoints_of.pop(1)[-1] == "reference"
    assert store.checkpoints_of == {}
    assert store.measured == {step: [1 / (step + 1)] for step in (1, 2)}


def test_a_save_that_is_made_again_may_change_which_checkpoints_are_sent_whole(spec: Specs) -> None:
    """The state of step 2 is evaluated once its run is resumed, and is not the best after all."""
    store = Noting(spec().folder)
    recorder = Recorder(spec("sqlite:///unused.db"), lambda _: store)
    recorder.start()
    attempt = RunFolder.create(open_storage(spec().checkpoint.storage), recorder.run_id()).claim()
    uris = {step: write_checkpoint(attempt, step, state(step, items=4)).shown for step in (1, 2)}

    def save(step: int, *essential: int) -> CheckpointRow:
        whole = tuple((step, uris[step]) for step in essential)
        return CheckpointRow(step, uris[step], None, 1, 0.0, 0.0, 0.0, 1.0, (), whole)

    recorder.tell(step_row(1), save(1, 1), step_row(2), save(2, 2))
    wait_until(lambda: store.checkpoints_of == {2: ["copy"], 1: ["reference"]})
    recorder.tell(save(2, 2, 1), Finished({"step": 2}))
    recorder.close(timeout_s=20.0)
    assert store.checkpoints_of == {2: ["copy"], 1: ["reference", "copy"]}


@pytest.mark.parametrize("why", ["", "its graph cannot be traced"])
def test_the_final_model_is_sent_or_it_is_told_why_there_is_none(spec: Specs, why: str) -> None:
    """And the run ends well either way."""
    store, folder = recorded(spec(), why)
    assert store.models == ([] if why else [2])
    assert ("no model for MLflow: its graph cannot be traced" in (folder / "log.txt").read_text()) == bool(
        why
    )
    assert json.loads((folder / "run.json").read_text())["status"] == "FINISHED"


@pytest.mark.parametrize("takes_points", [True, False])
def test_a_run_whose_points_are_not_all_sent_is_not_told_to_have_finished(
    spec: Specs, takes_points: bool
) -> None:
    """A reader takes FINISHED for a whole history: it waits until the rest is sent."""
    store = Noting(spec().folder)
    store.takes_points = takes_points
    recorder = Recorder(spec(), lambda _: store, patience_s=0.1)
    recorder.start()
    recorder.tell(step_row(1), Finished({"step": 1}))
    with nullcontext() if takes_points else pytest.raises(RecordError):
        recorder.close(timeout_s=0.5)
    status = json.loads((recorder.run_folder() / "run.json").read_text())["status"]
    assert status == ("FINISHED" if takes_points else "RUNNING")


@pytest.mark.parametrize(
    ("names", "told"), [(["a.txt"], "artifact a.txt"), (["a.txt", "b.txt"], "artifact a.txt (and 1 more)")]
)
def test_the_first_refusal_is_told_with_the_number_of_the_others(
    spec: Specs, names: list[str], told: str
) -> None:
    store = Noting(spec().folder)
    store.refuses = names
    recorder = Recorder(spec(), lambda _: store)
    recorder.start()
    recorder.tell(*(Document(name, "") for name in names), Finished({"step": 0}))
    with raises(problems.NOT_RECORDED, got="it is too large", what=told):
        recorder.close(timeout_s=20.0)
