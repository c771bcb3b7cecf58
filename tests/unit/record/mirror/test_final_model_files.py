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
from torch import Tensor, nn

from jobs.digits.job import Digits
from lockstep.job.interface import Job
from lockstep.job.loading import load_job
from lockstep.record.events.union import Finished
from lockstep.record.mirror.final_model_files import DESCRIPTION, GRAPH, FinalModel
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from lockstep.training.final_model import keep_final_model
from lockstep.training.step.activations import checkpoint_activations
from lockstep.training.step.weight_average import Average
from lockstep.training.weights import save_weights
from tests.forked import script
from tests.unit.record.rows import step_row

Specs = Callable[..., Spec]


class Pair(Digits):
    """A job whose model takes two arguments."""

    def example_input(self) -> tuple[Tensor, ...]:
        return torch.zeros(2, 1, 8, 8), torch.zeros(2)


class Drawn(nn.Module):
    """Random features in no file of weights, a temperature that training moves, and what is planted where it is traced."""

    def __init__(self, planted: str = "") -> None:
        super().__init__()
        self.planted, self.temperature = planted, 1.0
        self.register_buffer("features", torch.randn(64, 4), persistent=False)
        self.out = nn.Linear(4, 10)

    def forward(self, images: Tensor) -> Tensor:
        if self.planted == "branch" and images.sum() > 0:
            images = images * 2
        logits: Tensor = self.out((images.flatten(1) @ self.features).cos()) / self.temperature
        if self.planted == "one bit" and torch.compiler.is_exporting():
            logits = torch.nextafter(logits, torch.full_like(logits, torch.inf))
        return logits


def ended_with(spec: Spec, job: Job, model: nn.Module) -> Recorder:
    recorder = Recorder(spec)
    recorder.start()
    folder = recorder.run_folder()
    files = save_weights(folder, {"final": model.state_dict()})
    files += keep_final_model(job, model, folder)
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


@pytest.mark.scenario
def test_the_final_model_computes_the_same_bits_without_the_jobs_code(
    database: str, spec: Specs, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    job = load_job("jobs.digits.job:Digits", {"width": 8})
    model = job.model().eval()
    run = ended_with(spec(database), job, model)
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


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_final_model_is_the_trained_one_with_what_no_file_of_weights_has(
    tmp_path: Path, *, recomputes: bool
) -> None:
    """The buffers that it drew, what training moved besides, and averaged weights; also where activations are recomputed."""
    job: Any = load_job("jobs.digits.job:Digits", {"width": 8})
    model = Drawn()
    model.features.add_(1)
    model.temperature = 0.5
    average = Average(model, 0.5)
    average.move()
    with torch.no_grad():
        model.out.weight.zero_()
    images = job.example_input()[0]
    if recomputes:
        job.activation_checkpoints = lambda model: [model.out]
        checkpoint_activations(job, model)
    with average.shown(), torch.no_grad():
        (description,) = keep_final_model(job, model, tmp_path)
        wanted = model(images)
    assert FinalModel.read(tmp_path / "model").error == "", description.read_text()
    graph = torch.export.load(tmp_path / "model" / GRAPH).module()
    assert torch.equal(graph(images), wanted)
    assert not any(model.out.weight.flatten())


@pytest.mark.scenario
def test_the_final_model_is_sent_without_torch(tmp_path: Path) -> None:
    """To import it, and its compiler, in the recorder would cost the end of every run seconds."""
    job = load_job("jobs.digits.job:Digits", {"width": 8})
    (description,) = keep_final_model(job, job.model(), tmp_path)
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "import lockstep.checkpoint.runs.run_checkpoints, lockstep.record.writer_process\n"
        "from lockstep.record.mirror.final_model_files import FinalModel\n"
        "from lockstep.record.mirror.mlflow.models import fill_final\n"
        f"folder, place = Path({str(description.parent)!r}), Path({str(tmp_path / 'sent')!r})\n"
        "fill_final(folder, FinalModel.read(folder))('m-1', place)\n"
        "assert (place / 'data/graph/model.pt2').read_bytes() == (folder / 'graph/model.pt2').read_bytes()\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("job", "planted", "reason"),
    [
        (Digits, "branch", "GuardOnDataDependentSymNode"),
        (Digits, "one bit", "the traced graph gives other bits than the trained model"),
        (Pair, "", "example_input has 2 arguments, and a model in MLflow's PyTorch format takes one"),
    ],
)
def test_a_model_that_cannot_be_traced_costs_the_run_nothing(
    database: str, spec: Specs, job: type[Digits], planted: str, reason: str
) -> None:
    run = ended_with(spec(database), job(job.Params()), Drawn(planted))
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
    from lockstep.record.mirror.mlflow import MlflowStore

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


def test_a_full_disk_costs_the_final_model_alone(tmp_path: Path) -> None:
    """Torch ends the process where it writes an archive to a full disk itself: the end of the run had been lost with it."""
    done = script(
        "import resource, signal\n"
        "from pathlib import Path\n"
        "from jobs.digits.job import Digits\n"
        "from lockstep.job.loading import load_job\n"
        "from lockstep.training.final_model import keep_final_model\n"
        "job = load_job('jobs.digits.job:Digits', {})\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))\n"
        f"print(keep_final_model(job, job.model(), Path({str(tmp_path)!r})))\n"
    )
    said = done.communicate()
    assert done.wait() == 0, said
    assert "File too large" in FinalModel.read(tmp_path / "model").error
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [DESCRIPTION]
