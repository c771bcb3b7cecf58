"""What nobody names decides all the same: variables, modules from elsewhere, installed packages, settings. Each is refused in a resume where it changed.

The negative control is beside each: the change does give other bits under the same spec, and without it the run goes on to the bits, and the
identity, of the one that was not interrupted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.reader import load_newest
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import DeterminismError
from lockstep.training import problems
from tests.distributed.pool import Pool
from tests.distributed.test_resume import taken_up
from tests.distributed.training import Document, Trained, train, train_attempt
from tests.raised import raises
from tests.unit.job.test_source import forget

RUN = "run"

JOB = """
import importlib, importlib.util, os, torch
from torch import nn
import lockstep

AT_IMPORT = float(os.environ.get("MY_IMPORTED", "1"))
spec = importlib.util.spec_from_file_location("by_file", os.path.join(os.path.dirname(__file__), "..", "elsewhere", "by_file.py"))
by_file = importlib.util.module_from_spec(spec)
spec.loader.exec_module(by_file)

class Data(torch.utils.data.Dataset):
    def __init__(self, params): self.params, self.parent = params, os.getpid()
    def __len__(self): return 16
    def __getitem__(self, i):
        if self.params.way == "loader" and os.getpid() != self.parent:
            os.environ.get("OF_LOADER")
        x = torch.full((4,), float(i), dtype=torch.float32) / 16
        if self.params.way == "setting in fetch": torch.set_default_dtype(torch.float64)
        return x

class Mine(lockstep.Job):
    class Params(lockstep.Params):
        way: str = ""
    placement_variables = ("CORPUS_NAME",)
    steps = 0
    def model(self):
        if self.params.way == "import": torch.set_default_dtype(torch.float32), torch.set_float32_matmul_precision("medium")
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    def train_data(self): return Data(self.params)
    def scale(self, x):
        match self.params.way:
            case "variable": return float(os.environ.get("MY_SCALE", "1"))
            case "import time": return AT_IMPORT
            case "by file": return by_file.SCALE
            case "place": return len(os.environ["CORPUS_ROOT"]) * 0 + len(os.environ["CORPUS_NAME"]) * 0 + 1
            case "secret": return len(os.environ["SERVICE_API_KEY"]) * 0 + 1
            case "late" if float(x.sum()) > 4: return float(os.environ.get("MY_SCALE", "1"))
            case "late module" if float(x.sum()) > 4: return importlib.import_module("late_" + "of_inputs").SCALE
            case "module":
                import elsewhere_of_inputs
                return elsewhere_of_inputs.SCALE
            case "package":
                import tiny_of_inputs
                return tiny_of_inputs.SCALE
            case "setting in fetch": return float(torch.tensor(0.1))
            case "setting in loss": torch.set_float32_matmul_precision("medium")
        return 1.0
    def loss(self, model, batch):
        return lockstep.Loss(model(batch).square().sum() * self.scale(batch), len(batch))
    def after_step(self, model, step):
        if self.params.way == "setting" and step == 3: torch.set_float32_matmul_precision("medium")
        if self.params.way == "threads" and step == 3: torch.set_num_threads(2)
        if self.params.way == "autocast" and step == 3: torch.set_autocast_enabled("cpu", True)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for folder in ("project", "elsewhere", "target"):
        (tmp_path / folder).mkdir()
    (tmp_path / "project" / "job_of_inputs.py").write_text(JOB)
    for name in ("elsewhere_of_inputs", "late_of_inputs", "by_file"):
        (tmp_path / "elsewhere" / f"{name}.py").write_text("SCALE = 1.0\n")
    install(tmp_path, "1.0", 1.0)
    monkeypatch.setattr(
        sys, "path", [*(str(tmp_path / one) for one in ("project", "elsewhere", "target")), *sys.path]
    )
    for name in ("MY_SCALE", "MY_IMPORTED", "OF_LOADER"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    forget(tmp_path)


def install(project: Path, version: str, scale: float) -> None:
    """As `pip install --target` does: the package, and the folder of its metadata."""
    target = project / "target"
    for old in target.glob("*.dist-info"):
        old.rename(target / f"tiny_of_inputs-{version}.dist-info")
    (target / f"tiny_of_inputs-{version}.dist-info").mkdir(exist_ok=True)
    (target / f"tiny_of_inputs-{version}.dist-info" / "RECORD").write_text("tiny_of_inputs.py,,\n")
    (target / "tiny_of_inputs.py").write_text(f"SCALE = {scale}\n")


def document(project: Path, way: str, **data: Any) -> Document:
    return {
        "job": {"use": "job_of_inputs:Mine", "params": {"way": way}},
        "batch": {"global": 4, "micro": 2},
        "data": {"shuffle": "none", **data},
        "length": {"steps": 4},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "checkpoint": {"storage": str(project / "runs"), "every": {"steps": 1}},
    }


def begin(project: Path, way: str, **data: Any) -> Trained:
    """A run that is stopped after step 3."""
    return train_attempt(document(project, way, **data), RUN, AttemptOrigin(), 3)


def resumed(project: Path, way: str, **data: Any) -> Trained:
    """The rest of it, as in another process."""
    forget(project)
    return train_attempt(document(project, way, **data), RUN, taken_up(str(project / "runs"), None))


def whole(project: Path, way: str) -> Trained:
    """The run without an interruption, as in another process."""
    forget(project)
    return train({**document(project, way), "checkpoint": {"storage": str(project / "whole")}})


def saved(project: Path) -> Any:
    """The facts of the newest checkpoint."""
    loaded = load_newest(RunFolder.open(open_storage(str(project / "runs")), RUN), lambda text: None)
    assert loaded is not None
    return loaded.manifest.facts


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "variable": (lambda project: os.environ.update(MY_SCALE="2"), r"variable\.MY_SCALE is '2' and was None"),
    "late": (lambda project: os.environ.update(MY_SCALE="2"), r"variable\.MY_SCALE is '2' and was None"),
    "import time": (
        lambda project: os.environ.update(MY_IMPORTED="2"),
        r"variable\.MY_IMPORTED is '2' and was None",
    ),
    "by file": (
        lambda project: (project / "elsewhere" / "by_file.py").write_text("SCALE = 2.25\n"),
        r"job\.source\.by_file\.py is '\w+' and was '\w+'",
    ),
    "module": (
        lambda project: (project / "elsewhere" / "elsewhere_of_inputs.py").write_text("SCALE = 2.25\n"),
        r"job\.source\.elsewhere_of_inputs\.py is '\w+' and was '\w+'",
    ),
    "late module": (
        lambda project: (project / "elsewhere" / "late_of_inputs.py").write_text("SCALE = 2.25\n"),
        r"job\.source\.late_of_inputs\.py is '\w+' and was '\w+'",
    ),
    "package": (
        lambda project: install(project, "1.1", 2.25),
        r"distribution\.tiny-of-inputs is '1\.1' and was '1\.0'",
    ),
}


@pytest.mark.scenario
@pytest.mark.thinned(7)
@pytest.mark.parametrize("way", CHANGES)
def test_an_input_that_nobody_named_is_refused_where_it_changed(
    project: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1. Late ones are met in step 3 first: the record's identity and the checkpoint's are those from there on."""
    for name in ("MY_SCALE", "MY_IMPORTED"):  # is put back afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    undisturbed = whole(project, way)
    forget(project)
    stopped = begin(project, way)
    assert saved(project).identity == stopped.identity
    change, told = CHANGES[way]
    change(project)
    with raises(problems.OTHER_IDENTITY, remedy="put it back") as refused:
        resumed(project, way)
    assert re.match(f"resume: {told} in the run", refused.value.evidence)
    other = whole(project, way)
    assert other.weights_digest != undisturbed.weights_digest
    assert other.identity != undisturbed.identity


@pytest.mark.every(12)
@pytest.mark.thinned(11)
@pytest.mark.parametrize("way", ["", *CHANGES, "place", "secret", "setting in loss", "import"])
def test_what_is_unchanged_goes_on_to_the_same_bits_under_the_same_identity(
    project: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORPUS_ROOT", "/here")
    monkeypatch.setenv("CORPUS_NAME", "one")
    monkeypatch.setenv("SERVICE_API_KEY", "sesame")
    undisturbed = whole(project, way)
    forget(project)
    begin(project, way)
    rest = resumed(project, way)
    assert (rest.weights_digest, rest.rows, rest.identity) == (
        undisturbed.weights_digest,
        undisturbed.rows,
        undisturbed.identity,
    )
    assert not [text for text in rest.warnings if "resume:" in text]


@pytest.mark.scenario
def test_a_place_may_change_and_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, or because the job says so."""
    monkeypatch.setenv("CORPUS_ROOT", "here")
    monkeypatch.setenv("CORPUS_NAME", "one")
    undisturbed = whole(project, "place")
    forget(project)
    begin(project, "place")
    monkeypatch.setenv("CORPUS_ROOT", "there")
    monkeypatch.setenv("CORPUS_NAME", "two")
    rest = resumed(project, "place")
    assert (rest.weights_digest, rest.identity) == (undisturbed.weights_digest, undisturbed.identity)
    told = [text for text in rest.warnings if text.startswith("resume: ")]
    assert [text.partition(";")[0] for text in told] == [
        "resume: variable.CORPUS_NAME is 'two' and was 'one' in the run",
        "resume: variable.CORPUS_ROOT is 'there' and was 'here' in the run",
    ]


def test_a_secret_is_no_part_of_the_identity_and_is_not_kept(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that was renewed is no reason to refuse a run."""
    monkeypatch.setenv("SERVICE_API_KEY", "sesame")
    begin(project, "secret")
    facts = saved(project)
    assert "sesame" not in repr((facts.identity_fields, facts.environment))
    monkeypatch.setenv("SERVICE_API_KEY", "renewed")
    assert resumed(project, "secret").summary["step"] == 4


def test_what_loader_processes_read_is_found(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by them alone: this process does not fetch with any."""
    monkeypatch.setenv("OF_LOADER", "1")
    begin(project, "loader", loader_processes=1)
    assert saved(project).identity_fields["variable.OF_LOADER"] == "1"
    monkeypatch.setenv("OF_LOADER", "2")
    with raises(problems.OTHER_IDENTITY, name="variable.OF_LOADER", got="'2'", wanted="'1'"):
        resumed(project, "loader", loader_processes=1)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("setting", r"the job changed torch\.set_float32_matmul_precision from highest to medium"),
        ("threads", r"the job changed torch\.set_num_threads from 1 to 2"),
        ("autocast", r"the job changed torch\.set_autocast_enabled\.cpu from False to True"),
    ],
)
def test_a_setting_that_a_hook_changes_is_refused_by_name(project: Path, way: str, told: str) -> None:
    """No checkpoint has it: a resumed run would go on without."""
    with pytest.raises(
        DeterminismError,
        match=rf"^determinism strict: between steps 3 and 4, {told}, which no checkpoint keeps",
    ):
        train(document(project, way))


@pytest.mark.scenario
def test_a_setting_that_a_fetch_changes_reaches_no_loss(project: Path) -> None:
    """Whoever fetches: with loader processes it could not, and without them it would have."""
    alone = whole(project, "setting in fetch")
    forget(project)
    beside = train(document(project, "setting in fetch", loader_processes=1))
    assert (beside.weights_digest, beside.rows) == (alone.weights_digest, alone.rows)


def test_a_setting_of_the_whole_run_is_part_of_its_identity(project: Path) -> None:
    medium, plain = whole(project, "import"), whole(project, "")
    assert medium.identity != plain.identity


@pytest.mark.every(2)
@pytest.mark.parametrize("late", [False, True])
def test_what_one_worker_alone_reads_is_in_the_identity_of_all(
    pool: Pool, tmp_path: Path, late: bool
) -> None:
    """From the start, or before the state is saved."""
    params = {"claim": str(tmp_path / "claim"), "late": late}
    spec = {
        **document(tmp_path, ""),
        "job": {"use": "tests.distributed.small_jobs:ReadsOnOne", "params": params},
        "checkpoint": {"storage": str(tmp_path / "runs"), "every": {"steps": 4}},
    }
    found = pool.run(2, train_attempt, spec, RUN, AttemptOrigin())
    facts = saved(tmp_path)
    assert facts.identity_fields["variable.OF_ONE_WORKER"] is None
    assert {facts.identity} == {one.identity for one in found}
