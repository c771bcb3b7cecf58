"""What a job imports by other ways than by its statements is part of its source, whatever else a process has imported."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.job.inputs.imports import (
    Asked,
    below,
    imported_by,
    imports_noted,
    imports_of_job,
    roots_of,
)
from lockstep.job.loading import load_job
from tests.unit.job.test_source import forget

FILES = {
    "helper.py": "SCALE = 3.0\n",
    "exp/__init__.py": "",
    "exp/helper.py": "import deeper\nSCALE = 1.0\n",
    "exp/deeper.py": "",
    "exp/unused.py": "raise SystemExit\n",
    "plugins/__init__.py": "",
    "plugins/mlp.py": "from plugins import layers\n",
    "plugins/layers.py": "from torch import nn\n",
    "plugins/cnn.py": "",
    "plugins/held.py": "def make(): ...\n",
    "registry/__init__.py": "import importlib, pathlib\n"
    "def fill():\n"
    "    for one in sorted(pathlib.Path(__file__).parent.glob('r*.py')):\n"
    "        importlib.import_module(f'{__name__}.{one.stem}')\n"
    "fill()\n",
    "registry/rnn.py": "",
    "registry/resnet.py": "",
    "registry/other.py": "",
    "by_path/loss.py": "",
    ".venv/lib/site-packages/installed_of_imports.py": "",
    "exp/job.py": """
import importlib, importlib.util, os, sys
sys.path.insert(0, os.path.dirname(__file__))
sys.path.append(os.path.join(os.path.dirname(__file__), "..", ".venv", "lib", "site-packages"))
import helper, installed_of_imports
import lockstep
make = getattr(importlib.import_module("plugins." + "held"), "make")

class Mine(lockstep.Job):
    class Params(lockstep.Params):
        arch: str = "mlp"
    def __init__(self, params):
        super().__init__(params)
        __import__("regist" + "ry")
    def model(self):
        return importlib.import_module(f"plugins.{self.params.arch}")
    def train_data(self):
        path = os.path.join(os.path.dirname(__file__), "..", "by_path", "loss.py")
        spec = importlib.util.spec_from_file_location("loss_of_imports", os.path.normpath(path))
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    def loss(self, model, batch):
        import later_of_imports
""",
    "later_of_imports.py": "",
}

ALWAYS = {
    "exp/helper.py", "exp/deeper.py", "plugins/__init__.py", "plugins/held.py", "plugins/mlp.py", "plugins/layers.py",
    "registry/__init__.py", "registry/rnn.py", "registry/resnet.py", "registry/other.py", "by_path/loss.py",
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source root whose job imports a module beside it as a script would, and others by names that it computes."""
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    forget(tmp_path)


def made(**params: str) -> dict[str, bytes]:
    """The files beside the sources of a job whose data and model were made."""
    job = load_job("exp.job:Mine", params)
    with imports_of_job(job):
        job.train_data()
        if params.get("arch", "mlp") == "mlp":
            job.model()
    return imported_by("exp.job:Mine", job).files


def test_a_module_beside_the_job_and_those_with_computed_names_are_its_source(project: Path) -> None:
    found = made()
    assert set(found) == ALWAYS
    assert found["exp/helper.py"] == (project / "exp" / "helper.py").read_bytes()


def test_it_is_the_same_whatever_else_was_imported_before(project: Path) -> None:
    sys.path.insert(0, str(project / "exp"))
    for name in ("plugins.cnn", "plugins.mlp", "registry.other"):
        importlib.import_module(name)
    sys.path.remove(str(project / "exp"))
    importlib.import_module("exp.job")
    assert set(made()) == ALWAYS
    assert set(made()) == ALWAYS  # a second run in the process
    assert not {"plugins/mlp.py", "plugins/cnn.py"} & set(made(arch="cnn"))  # which asks for neither


def test_import_is_as_it_was_afterwards_and_a_request_that_fails_is_none(project: Path) -> None:
    before, asked = builtins.__import__, Asked()
    with pytest.raises(ModuleNotFoundError), imports_noted(asked):
        importlib.import_module(".nowhere", "plugins")
    assert builtins.__import__ is before
    with imports_noted(asked):
        importlib.import_module(".cnn", "plugins")
    assert asked.modules == asked.by_job == {"plugins.cnn"}


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_what_python_imports_for_every_program_is_among_them(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It may change anything in any module; but not one that the system has installed."""
    monkeypatch.delitem(sys.modules, name, raising=False)
    other = project.parent / f"of_{project.name}"
    other.mkdir()
    (other / f"{name}.py").write_text("import torch\n")
    monkeypatch.setattr(sys, "path", [str(other), *sys.path])
    module = importlib.import_module(name)
    del sys.modules[name]
    monkeypatch.setitem(sys.modules, name, module)
    assert set(made()) == {*ALWAYS, f"{name}.py"}
    monkeypatch.setattr(sys.modules[name], "__file__", str(Path(importlib.__file__)))
    assert set(made()) == ALWAYS


@pytest.mark.parametrize(
    ("link", "target", "use", "name"),
    [
        ("linked_jobs", "real/linked_jobs", "linked_jobs.job:J", "linked_jobs/rate.txt"),
        ("linked_jobs", "real/second", "linked_jobs.job:J", "rate.txt"),
        ("linked_job.py", "real/second/job.py", "linked_job:J", "rate.txt"),
    ],
)
def test_what_lies_beside_the_real_file_of_a_linked_job_is_the_job_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, target: str, use: str, name: str
) -> None:
    """As `Path(__file__).resolve().parent` finds it."""
    folder = (tmp_path / target).parent if target.endswith(".py") else tmp_path / target
    folder.mkdir(parents=True)
    (folder / "job.py").touch()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / link).symlink_to(tmp_path / target)
    monkeypatch.syspath_prepend(tmp_path / "work")
    roots = roots_of(use)
    assert below(folder / "rate.txt", roots) == name
    assert below(tmp_path / "rate.txt", roots) is None
    assert below(folder / "rate.txt", roots[:1]) is None
