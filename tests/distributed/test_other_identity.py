"""A run is resumed where it is the same run: the same files of its job, the same params with their defaults, the same data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.training import problems
from tests.distributed.test_resume import taken_up
from tests.distributed.training import Document, Trained, train, train_attempt
from tests.raised import raises
from tests.unit.job.test_source import forget

RUN = "run"

JOB = """
import importlib, os, sys
sys.path.insert(0, os.path.dirname(__file__))
import helper_of_identity
import numpy as np, torch, lockstep

class Data(torch.utils.data.TensorDataset):
    def fingerprint(self):
        return {"labels": np.array(LABELS), "version": 3}

LABELS = list(range(4096))

class Mine(lockstep.Job):
    class Params(lockstep.Params):
        arch: str = "mlp"
        rate: float = 1.0
        noise: float = float(os.environ.get("NOISE", "0.1"))
        limit: bool | int = 1
        where: lockstep.Placement[str] = os.environ.get("NOISE", "here")
    def identity(self):
        return {"few": [1, 2], "many": torch.tensor(LABELS)}
    def model(self):
        return importlib.import_module(f"plugins_of_identity.{self.params.arch}").make()
    def train_data(self):
        return Data(torch.randn(16, 4))
    def loss(self, model, batch):
        return lockstep.Loss(model(batch[0]).square().sum() * helper_of_identity.SCALE, len(batch[0]))
"""

FILES = {
    "other_identity/job.py": JOB,
    "other_identity/helper_of_identity.py": "SCALE = 1.0\n",
    "plugins_of_identity/mlp.py": "from torch import nn\ndef make(): return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    forget(tmp_path)


def document(project: Path, **params: Any) -> Document:
    checkpoint = {"storage": str(project / "runs"), "every": {"steps": 1}}
    job = {"use": "other_identity.job:Mine", "params": params}
    return {"job": job, "batch": {"global": 4, "micro": 2}, "length": {"steps": 4}, "checkpoint": checkpoint, "threads": 1}  # fmt: skip


def resumed(project: Path, change: Callable[[], Any] = lambda: None, **params: Any) -> Trained:
    """The rest of a run that was stopped after step 2, begun anew after a change, as in another process."""
    change()
    forget(project)
    return train_attempt(document(project, **params), RUN, taken_up(str(project / "runs"), None))


def begin(project: Path, **params: Any) -> None:
    train_attempt(document(project, **params), RUN, AttemptOrigin(), 2)


CHANGES: dict[str, tuple[str, str, str]] = {
    "the module beside the job": ("other_identity/helper_of_identity.py", "1.0", "3.0"),
    "the module with a computed name": ("plugins_of_identity/mlp.py", "0.1", "0.9"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_file_of_the_job_is_refused_however_it_is_imported(project: Path, what: str) -> None:
    path, old, new = CHANGES[what]
    begin(project)
    text = (project / path).read_text().replace(old, new)
    with raises(problems.OTHER_IDENTITY, name=f"job.source.{path}"):
        resumed(project, lambda: (project / path).write_text(text))


@pytest.mark.scenario
def test_what_is_unchanged_is_resumed_to_the_same_bits(project: Path) -> None:
    whole = train(document(project, limit=1))
    forget(project)
    begin(project, limit=1)
    (project / "other_identity" / "unused.py").write_text("")
    rest = resumed(project, limit=1)
    assert (rest.weights_digest, rest.rows, rest.identity) == (
        whole.weights_digest,
        whole.rows,
        whole.identity,
    )


def test_defaults_of_params_are_part_of_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(project)
    with raises(problems.OTHER_IDENTITY, name="job.params.noise", got="2.0", wanted="0.1"):
        resumed(project, lambda: monkeypatch.setenv("NOISE", "2.0"))


@pytest.mark.scenario
def test_true_is_not_1_and_1_is_a_float_where_the_param_is(project: Path) -> None:
    begin(project, limit=1, rate=1)
    with raises(problems.OTHER_IDENTITY, name="job.params.limit", got="True", wanted="1"):
        resumed(project, limit=True, rate=1)
    assert resumed(project, rate=1.0, noise=0.1, where="there").summary["step"] == 4
