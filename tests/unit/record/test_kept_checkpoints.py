"""Which checkpoints are left of twenty: those that the spec keeps, those that are pinned, those with an alias; on disk and server alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.calls import pinning
from lockstep.checkpoint.manifest import Facts
from lockstep.checkpoint.pruning import apply
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.pins import pin, pinned, unpin
from lockstep.checkpoint.runs.run_checkpoints import pin_aliased, saved_steps
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.saver import AsyncSaver, Saved
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import SpecError
from lockstep.record.events.union import CheckpointRow, Finished
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.unit.checkpoint.one_process import write_checkpoint
from tests.unit.checkpoint.states import state
from tests.unit.record.server import Server

Specs = Callable[..., Spec]
BEST = 4
"""The step with the lowest loss."""
KEEP = Keep(last=2, metric="eval/loss", every=10)


class Twenty:
    """A run that saves after every step, with its record."""

    def __init__(self, spec: Spec) -> None:
        self.recorder = Recorder(spec, on_aliases=partial(self._aliases, spec))
        self.recorder.start()
        self.run_id = self.recorder.run_id()
        self.attempt: Attempt = RunFolder.create(open_storage(spec.checkpoint.storage), self.run_id).claim()
        self.saver = AsyncSaver(self.attempt, keep=KEEP, on_saved=self._saved)
        self.looked = threading.Event()

    def _aliases(self, spec: Spec, run_id: str, steps: frozenset[int]) -> None:
        pin_aliased(spec.checkpoint.storage, run_id, steps)
        self.looked.set()

    def _saved(self, saved: Saved) -> None:
        assert saved.checkpoint is not None and saved.warning is None
        self.recorder.tell(CheckpointRow(
                saved.step, saved.checkpoint.shown, None, saved.nbytes, *saved.pause, saved.written_s, time.time(),
                saved.deleted, saved.essential,
            ))  # fmt: skip

    def save(self, step: int) -> None:
        """Save, and wait until it is written."""
        self.saver.save(step, state(step, items=4), Facts(metrics={"eval/loss": abs(step - BEST) + 1.0}))
        self.saver.settle()

    def close(self) -> None:
        self.saver.close()
        self.recorder.tell(Finished({"step": 20}))
        self.recorder.close()


def models(uri: str, run_id: str) -> dict[str, Any]:
    """The models of a run that are READY, by name."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.search_logged_models([client.get_run(run_id).info.experiment_id])
    return {model.name: model for model in found if model.source_run_id == run_id and model.status == "READY"}


def give_alias(uri: str, run_id: str, step: int) -> None:
    """As a person does with the buttons of MLflow's pages."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    model = models(uri, run_id)[f"checkpoint-{step}"]
    name = f"digits-{run_id}"
    client.create_registered_model(name)
    version = client.create_model_version(name, f"models:/{model.model_id}", model_id=model.model_id)
    client.set_registered_model_alias(name, "champion", version.version)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Its URI, and the folder of its artifacts."""
    folder = tmp_path_factory.mktemp("server")
    with Server(folder) as running:
        yield running.uri, folder / "artifacts"


@pytest.fixture
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """The same of a server, or of a database that this process writes itself."""
    if request.param == "server":
        found: tuple[str, Path] = request.getfixturevalue("server")
        return found
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", uri
    )  # MLflow's registry asks this for the model behind a version
    return uri, tmp_path / "mlartifacts"


@pytest.mark.parametrize(
    ("store", "kept"),
    [
        ("sqlite", "artifact"),
        pytest.param("server", "artifact", marks=pytest.mark.exact),
        pytest.param("server", "reference", marks=pytest.mark.exact),
    ],
    indirect=["store"],
)
@pytest.mark.scenario
def test_of_twenty_checkpoints_exactly_those_are_left_that_were_promised(
    spec: Specs, tmp_path: Path, store: tuple[str, Path], kept: str
) -> None:
    """The last two, the best, every tenth, the pinned and the one with an alias: on the disk, in MLflow, and in its files."""
    uri, artifacts = store
    run = Twenty(spec(record={"uri": uri, "checkpoints": kept}))
    for step in range(1, 21):
        run.save(step)
        if step == 6:
            pin(run.attempt.run, 6)
        if step == 8:
            pin(run.attempt.run, 8)
            until = time.monotonic() + 60
            while "checkpoint-8" not in models(uri, run.run_id):
                assert time.monotonic() < until
                time.sleep(0.1)
            give_alias(uri, run.run_id, 8)
            run.looked.clear()
        if step == 9:
            assert run.looked.wait(60)
            unpin(run.attempt.run, 8)  # by now the alias alone holds it
    run.close()
    promised = {BEST, 6, 8, 10, 19, 20}
    assert set(saved_steps(run.attempt.run)) == promised
    assert pinned(run.attempt.run) == {6, 8}
    of_run = tmp_path / "runs" / run.run_id
    folders = {path.parent for path in of_run.glob("step-*/*")}
    assert {int(folder.name.removeprefix("step-")) for folder in folders} == promised
    left = models(uri, run.run_id)
    assert set(left) == {f"checkpoint-{step}" for step in promised}
    if kept == "reference":
        assert not [
            path for model in left.values() for path in artifacts.rglob(f"{model.model_id}/**/manifest.json")
        ]
        return
    for step in (10, 19):  # the tenth and the other of the last two are references
        assert left.pop(f"checkpoint-{step}").tags["lockstep.uri"] == str(of_run / f"step-{step:09}")
    for name, model in left.items():
        (folder,) = artifacts.rglob(model.model_id)
        files = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        saved = of_run / f"step-{int(name.removeprefix('checkpoint-')):09}"
        assert files == {path.name: path.read_bytes() for path in saved.iterdir()}, name
    of_models = {path.parts[-3] for path in artifacts.rglob("manifest.json")}
    assert of_models == {model.model_id for model in left.values()}


def test_without_its_pin_a_checkpoint_goes_with_the_next_save(tmp_path: Path) -> None:
    """The control: what holds a checkpoint is the pin, and nothing else."""
    run = RunFolder.create(open_storage(str(tmp_path)), "run-a")
    saver = AsyncSaver(run.claim(), keep=Keep(last=1))
    for step in range(1, 5):
        saver.save(step, state(step, items=4))
        saver.settle()
        if step == 1:
            pin(run, 1)
            pin(run, 1)  # again
        if step == 3:
            assert saved_steps(run) == [3, 1]
            unpin(run, 1)
            unpin(run, 1)
    saver.close()
    assert saved_steps(run) == [4]


@pytest.mark.parametrize("too_late", [True, False])
def test_a_pin_that_comes_too_late_is_refused_and_taken_away(
    spec: Specs, monkeypatch: pytest.MonkeyPatch, too_late: bool
) -> None:
    """Retention deletes the step between the look at what is there and the pin; the control is one that does not."""
    recorder = Recorder(spec())
    recorder.start()
    recorder.tell(Finished({"step": 2}))
    recorder.close()
    attempt = RunFolder.create(open_storage(spec().checkpoint.storage), recorder.run_id()).claim()
    for step in (1, 2):
        write_checkpoint(attempt, step, state(step, items=4))

    def late(run: RunFolder, step: int, reason: str) -> None:
        apply(attempt, [step] if too_late else [])
        pin(run, step, reason)

    monkeypatch.setattr(pinning, "pin", late)
    where: Any = {"uri": "off", "folder": spec().folder, "remove": False}
    if too_late:
        with pytest.raises(SpecError, match=r"^pin: run .* has no checkpoint of step 1; it has 2$"):
            pinning.change_pin(recorder.run_id(), 1, **where)
        assert not pinned(attempt.run)
    else:
        assert pinning.change_pin(recorder.run_id(), 1, **where) == [1]
