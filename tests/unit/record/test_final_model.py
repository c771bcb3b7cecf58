"""The model that a run ends with: what MLflow gives back computes the same bits, and runs nobody's code."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from torch import Tensor

from jobs.digits.job import Digits
from lockstep.job.interface import Job
from lockstep.job.loading import load_job
from lockstep.record.events import Finished
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from lockstep.training.final_model import keep_final_model
from lockstep.training.weights import save_weights
from tests.forked import script
from tests.unit.record.rows import step_row

Specs = Callable[..., Spec]


class Pair(Digits):
    """A job whose model takes two arguments."""

    def example_input(self) -> tuple[Tensor, ...]:
        return torch.zeros(2, 1, 8, 8), torch.zeros(2)


def ended_with(spec: Spec, job: Job, weights: dict[str, Any]) -> Recorder:
    recorder = Recorder(spec)
    recorder.start()
    folder = recorder.run_folder()
    files = save_weights(folder, {"final": weights})
    files += keep_final_model(job, files[0], folder)
    recorder.tell(step_row(1), step_row(2))
    recorder.tell(Finished({"step": 2}, files))
    recorder.close()
    return recorder


def models(uri: str, run_id: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_run(run_id).info.experiment_id
    return list(client.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'"))


def place(model: Any) -> Path:
    return Path(unquote(model.artifact_location.removeprefix("file://")))


def test_the_final_model_computes_the_same_bits_without_the_jobs_code(
    database: str, spec: Specs, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    job = load_job("jobs.digits.job:Digits", {"width": 8})
    model = job.model().eval()
    run = ended_with(spec(database), job, dict(model.state_dict()))
    assert "no model" not in (run.run_folder() / "log.txt").read_text(), (
        run.run_folder() / "log.txt"
    ).read_text()
    (found,) = models(database, run.run_id())
    assert (found.name, found.status) == ("final", "READY")
    (images,) = job.example_input()
    torch.save(images, tmp_path / "images.pt")
    program = (
        "import sys, torch, mlflow\n"
        "for name in [*sys.modules]:\n"  # what a process has that is not forked from one which has it all
        "    if name.partition('.')[0] in ('jobs', 'lockstep'):\n"
        "        del sys.modules[name]\n"
        f"mlflow.set_tracking_uri({database!r})\n"
        f"images = torch.load({str(tmp_path / 'images.pt')!r})\n"
        f"model = mlflow.pytorch.load_model('models:/{found.model_id}')\n"
        f"torch.save(model(images), {str(tmp_path / 'output.pt')!r})\n"
        "assert 'jobs' not in sys.modules and 'lockstep' not in sys.modules\n"
        f"signature = mlflow.models.get_model_info('models:/{found.model_id}').signature\n"
        "print(signature.inputs, signature.outputs)\n"
    )
    process = script(program, cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "(-1, 1, 8, 8)" in out and "(-1, 10)" in out
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "output.pt"), model(images))
    (archive,) = place(found).rglob("*.pt2")
    assert b"cposix\nsystem" not in archive.read_bytes()
    assert zipfile.is_zipfile(archive)


@pytest.mark.scenario
def test_the_final_model_is_sent_without_torch(tmp_path: Path) -> None:
    """To import it, and its compiler, in the recorder would cost the end of every run seconds."""
    job = load_job("jobs.digits.job:Digits", {"width": 8})
    (weights,) = save_weights(tmp_path, {"final": job.model().state_dict()})
    (description,) = keep_final_model(job, weights, tmp_path)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "import lockstep.checkpoint.runs, lockstep.record.writer_process\n"
        "from lockstep.record.final_model import FinalModel\n"
        "from lockstep.record.mlflow_store.models import fill_final\n"
        f"folder, place = Path({str(description.parent)!r}), Path({str(tmp_path / 'sent')!r})\n"
        "fill_final(folder, FinalModel.read(folder))('m-1', place)\n"
        "assert (place / 'data/graph/model.pt2').read_bytes() == (folder / 'graph/model.pt2').read_bytes()\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("job", "weights", "reason"),
    [
        (Digits, {"no_such_weight": torch.zeros(1)}, "Error(s) in loading"),
        (Pair, {}, "example_input has 2 arguments, and a model in MLflow's PyTorch format takes one"),
    ],
)
def test_a_model_that_cannot_be_traced_costs_the_run_nothing(
    database: str, spec: Specs, job: type[Digits], weights: dict[str, Tensor], reason: str
) -> None:
    run = ended_with(spec(database), job(job.Params()), weights)
    assert models(database, run.run_id()) == []
    from mlflow import MlflowClient

    told = MlflowClient(tracking_uri=database).get_run(run.run_id())
    assert told.info.status == "FINISHED"
    assert reason in told.data.tags["lockstep.model_error"]
    assert "no model for MLflow" in (run.run_folder() / "log.txt").read_text()


@pytest.mark.parametrize("by_reference", [False, True])
def test_checkpoints_are_ready_once_and_leave_nothing_when_deleted(
    database: str, tmp_path: Path, by_reference: bool
) -> None:
    """Two phases: READY is whole; deleted means the files are gone."""
    from lockstep.record.mlflow_store import MlflowStore

    store = MlflowStore(database, "checkpoints", "r")
    run_id = store.open(None)
    for step in range(1, 5):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        (folder / "model.bin").write_bytes(bytes([step]) * 1000)
        for _ in range(2):
            store.log_checkpoint(
                step, {"uri": str(folder), "manifest": f"sha-{step}"}, None if by_reference else folder
            )
    found = {model.name: model for model in models(database, run_id)}
    assert {name: model.status for name, model in found.items()} == {
        f"checkpoint-{i}": "READY" for i in range(1, 5)
    }
    store.delete_checkpoint(2)
    store.delete_checkpoint(2)
    left = {model.name for model in models(database, run_id)}
    assert left == {"checkpoint-1", "checkpoint-3", "checkpoint-4"}
    files = {name: list(place(model).rglob("model.bin")) for name, model in found.items()}
    if by_reference:
        assert not any(files.values())
        assert found["checkpoint-3"].tags["manifest"] == "sha-3"
    else:
        assert {name for name, kept in files.items() if kept} == left
        (kept,) = files["checkpoint-3"]
        assert kept.read_bytes() == bytes([3]) * 1000
