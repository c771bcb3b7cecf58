"""One step of a recorded run, looked into: it has the recorded bits while it is looked at, and what is shown of it is true."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep import train
from lockstep.calls.problems import MICRO_BATCH
from lockstep.calls.replay_call import Inspected, replay
from lockstep.errors import LockstepError, Problem
from lockstep.proof.problems import NO_SUCH_STEP
from tests.in_process import here
from tests.raised import raises
from tests.unit.proof.test_verify import contents, document
from tests.unit.proof.verified_jobs import PLANTED, Points


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(train(document(tmp_path_factory.mktemp("recorded"), rehearsal="off"), local=True).folder)


def replayed(run: Path, step: int, **options: Any) -> Inspected:
    return replay(run.name, step, uri="off", storage=run.parent, **options)


def test_a_step_that_is_inspected_has_its_bits_and_shows_its_modules(recorded: Path, tmp_path: Path) -> None:
    before = contents(recorded.parent)
    found = replayed(recorded, 7, inspect=True, folder=tmp_path)
    assert found.difference == ""
    assert [one["micro_batch"] for one in found.micro_batches] == [0, 1, 2, 3]
    modules = {seen["what"]: seen for seen in found.micro_batches[2]["modules"]}
    assert list(modules) == [f"output of {name}" for name in ("hidden", "norm", "drop", "out", "the model")]
    assert modules["output of hidden"]["shape"] == [3, 16]
    assert modules["output of hidden"]["not_finite"] == 0
    gradients = {seen["what"] for seen in found.micro_batches[2]["gradients"]}
    names = {f"{module}.{kind}" for module in ("hidden", "norm", "out") for kind in ("weight", "bias")}
    assert gradients == {f"gradient of {name}" for name in names}
    assert found.files == []
    assert list(tmp_path.iterdir()) == []
    assert contents(recorded.parent) == before


def test_a_micro_batch_is_written_out_with_its_samples(recorded: Path, tmp_path: Path) -> None:
    found = replayed(recorded, 6, micro_batch=1, folder=tmp_path / "out")
    (one,) = found.micro_batches
    batch = load_file(tmp_path / "out" / "batch.safetensors")
    assert json.loads((tmp_path / "out" / "samples.json").read_text()) == {"1": one["samples"]}
    assert batch["batch[2]"].tolist() == one["samples"]
    wanted = torch.stack([Points(56)[i][0] for i in one["samples"]])
    assert torch.equal(batch["batch[0]"], wanted)
    assert found.difference == ""


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("job", ["Nested", "Transposed"])
def test_a_micro_batch_is_written_out_however_its_tensors_lie_in_memory(tmp_path: Path, job: str) -> None:
    use = {"use": f"tests.unit.proof.verified_jobs:{job}"}
    run = Path(train(document(tmp_path / "runs", job=use, rehearsal="off"), local=True).folder)
    found = replayed(run, 2, micro_batch=1, inspect=True, folder=tmp_path / "out")
    assert found.difference == ""
    batch = load_file(tmp_path / "out" / "batch.safetensors")
    samples = found.micro_batches[0]["samples"]
    rows = [batch[f"batch[{i}]"] for i in range(len(samples))] if job == "Nested" else batch["batch[0]"]
    assert all(torch.equal(row, Points(56)[i][0]) for row, i in zip(rows, samples, strict=True))


def test_a_profile_is_a_trace_of_that_step_alone(recorded: Path, tmp_path: Path) -> None:
    found = replayed(recorded, 8, profile=True, folder=tmp_path)
    assert found.files == [str(tmp_path / "trace.json")]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("aten::cross_entropy_loss") == 4  # one for each of its micro-batches
    assert any("Optimizer.step" in str(name) for name in names)


def test_a_debugger_stops_before_a_micro_batch(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("p ('seen', tuple(batch[0].shape), m)\nc\n"))
    found = replayed(recorded, 7, micro_batch=3, debug=True, folder=Path(recorded.parent, "aside"))
    assert "('seen', (3, 8), 3)" in capsys.readouterr().out
    assert found.difference == ""


def test_a_step_with_other_bits_is_told(recorded: Path, tmp_path: Path) -> None:
    PLANTED["gradient"] = (6, 2)
    try:
        found = replayed(recorded, 7, folder=tmp_path)
    finally:
        PLANTED.clear()
    assert found.difference.startswith("gradient_digest of micro-batch 2 ")


def test_a_bad_value_is_told_with_its_module(recorded: Path, tmp_path: Path) -> None:
    """Anomaly detection names the operator; the step ends as it would have."""
    PLANTED["shift"] = float("nan")
    try:
        with pytest.raises(LockstepError, match="nan"):
            replayed(recorded, 5, inspect=True, folder=tmp_path)
    finally:
        PLANTED.clear()


def test_the_command_prints_what_was_seen(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (
        "replay",
        recorded.name,
        "--uri",
        "off",
        "--storage",
        str(recorded.parent),
        "--step",
        "7",
        "--inspect",
    )
    code, out, _ = here(monkeypatch, capfd, tmp_path, *words)
    assert code == 0
    assert "same: its row is as recorded\n" in out
    assert "  output of hidden " in out
    code, out, _ = here(monkeypatch, capfd, tmp_path, *words, "--micro-batch", "1", "--json")
    answer = json.loads(out)
    assert (code, answer["same"], len(answer["micro_batches"])) == (0, True, 1)
    assert {Path(path).parent.name for path in answer["files"]} == {f"replay-{recorded.name[:8]}-step-7"}


@pytest.mark.parametrize(
    ("step", "options", "problem", "facts"),
    [
        (13, {}, NO_SUCH_STEP, {"option": "step", "got": 13, "wanted": 12}),
        (3, {"micro_batch": 4}, MICRO_BATCH, {"got": 4, "wanted": 4, "step": 3}),
    ],
)
def test_mistakes_are_told_in_one_line(
    recorded: Path, step: int, options: dict[str, Any], problem: Problem[Any], facts: dict[str, Any]
) -> None:
    with raises(problem, **facts):
        replayed(recorded, step, **options)
