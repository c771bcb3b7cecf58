"""From `job.use` and `job.params` to a job, and what a mistake in them is told (G7)."""

from __future__ import annotations

import os
import pickle
import py_compile
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch
from threadpoolctl import ThreadpoolController

import lockstep.job.source
from lockstep.errors import JobImportError, SpecError
from lockstep.job import problems
from lockstep.job.identity import identity_fields
from lockstep.job.inputs.imports import imported_by
from lockstep.job.interface import Job
from lockstep.job.loading import load_job
from lockstep.spec.loading import load_spec
from tests.raised import raises

SOURCE = """
from enum import Enum
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

import lockstep
from lockstep.job.interface import Job

class Shape(Enum):
    ROUND = "round"

class Inner(lockstep.Params):
    depth: int = 1

class Flip(lockstep.Params):
    kind: Literal["flip"]
    chance: float = 0.5

class Crop(lockstep.Params):
    kind: Literal["crop"]
    size: int = 8

class Linear(lockstep.Params):
    bias: bool = True

class Pooled(lockstep.Params):
    size: int = 2

class Whole(lockstep.Job):
    def model(self): ...
    def train_data(self): ...
    def loss(self, model, batch): ...

class Digits(Whole):
    class Params(lockstep.Params):
        width: int = 64
        rate: float = Field(default=0.5, ge=0, le=1)
        sizes: tuple[int, int] = (1, 2)
        shape: Shape = Shape.ROUND
        folder: Path = Path("data")
        inner: Inner = Inner()
        layers: list[Inner] = []
        head: Linear | Pooled = Linear()
        augment: Flip | Crop | None = Field(default=None, discriminator="kind")

        @field_validator("width")
        @classmethod
        def _even(cls, width: int) -> int:
            if width % 2:
                raise ValueError("wanted an even width")
            return width

class Needy(Whole):
    class Params(lockstep.Params):
        classes: int

class Loose(Whole):
    class Params:
        pass

class NoJob:
    pass

digits = Digits({})
"""

Write = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module that can be imported in this test alone, and returns its name."""
    before = set(sys.modules)

    def write(source: str) -> str:
        (tmp_path / "written_job.py").write_text(source, encoding="utf-8")
        return "written_job"

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in set(sys.modules) - before:
        if name.startswith("written_job"):
            del sys.modules[name]


@pytest.fixture
def jobs(module: Write) -> str:
    return module(SOURCE)


def refusal(use: str, kind: type[SpecError] = JobImportError, **params: object) -> str:
    with pytest.raises(SpecError) as caught:
        load_job(use, params)
    assert type(caught.value) is kind
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_job_is_built_with_its_params(jobs: str) -> None:
    job = load_job(f"{jobs}:Digits", {"width": 32, "inner": {"depth": 3}})
    assert isinstance(job, Job)
    assert (job.params.width, job.params.rate, job.params.inner.depth) == (32, 0.5, 3)


def test_params_take_what_yaml_can_write_of_tuples_enums_and_paths(jobs: str) -> None:
    params = load_job(f"{jobs}:Digits", {"sizes": [3, 4], "shape": "round", "folder": "x"}).params
    assert (params.sizes, params.shape.name, params.folder) == ((3, 4), "ROUND", Path("x"))


def test_params_are_immutable(jobs: str) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_job(f"{jobs}:Digits", {}).params.width = 3


# --- job.use ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use", ["", "jobs.digits.job", "jobs.digits.job:", ":Digits", "jobs/digits/job.py:Digits"]
)
def test_use_is_a_module_and_a_class(use: str) -> None:
    assert refusal(use) == f'job.use: got {use!r}, wanted "package.module:Class"'


def test_a_module_that_is_not_there_is_told_with_the_place_of_the_search(jobs: str) -> None:
    assert refusal("written_jop:Digits") == (
        "job.use: cannot import 'written_jop': ModuleNotFoundError: No module named 'written_jop'; "
        f"paths are looked up from {sys.path[0]!r}"
    )


def test_a_module_that_is_missing_inside_the_jobs_module_is_told_by_its_own_name(module: Write) -> None:
    assert "No module named 'no_such_package'" in refusal(f"{module('import no_such_package')}:Digits")


def test_a_syntax_error_is_told_with_file_and_line(module: Write, tmp_path: Path) -> None:
    name = module("x = 1\nclass Digits(:\n    pass")
    message = refusal(f"{name}:Digits")
    assert f"SyntaxError in {tmp_path / 'written_job.py'}, line 2: " in message


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first"),
        ("raise RuntimeError", "RuntimeError: no message"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_whatever_breaks_the_import_is_told_in_a_line(source: str, reason: str, module: Write) -> None:
    assert f"cannot import 'written_job': {reason}; " in refusal(f"{module(source)}:Digits")


def test_a_class_that_is_not_there_is_told_the_nearest_job(jobs: str) -> None:
    assert refusal(f"{jobs}:Digit") == "job.use: 'written_job' has no 'Digit'; did you mean 'Digits'?"
    assert (
        refusal(f"{jobs}:Zzz")
        == "job.use: 'written_job' has no 'Zzz'; known here: Digits, Loose, Needy, Whole"
    )


def test_a_module_without_any_job_is_told_as_such(module: Write) -> None:
    name = module("from lockstep.job.interface import Job")
    assert (
        refusal(f"{name}:Digits")
        == "job.use: 'written_job' has no 'Digits'; it holds no subclass of lockstep.Job"
    )


@pytest.mark.parametrize("name", ["NoJob", "digits", "Inner"])
def test_what_is_no_job_is_refused(name: str, jobs: str) -> None:
    assert refusal(f"{jobs}:{name}") == f"job.use: 'written_job:{name}' is no subclass of lockstep.Job"


def test_params_of_another_kind_are_refused(jobs: str) -> None:
    assert (
        refusal(f"{jobs}:Loose")
        == "job.use: the Params of 'written_job:Loose' are no subclass of lockstep.Params"
    )


# --- job.params -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"widht": 3}, "job.params.widht: unknown key; did you mean 'width'?"),
        (
            {"zzz": 3},
            "job.params.zzz: unknown key; known here: augment, folder, head, inner, layers, rate, shape, sizes, width",
        ),
        ({"depth": 3}, "job.params.depth: unknown key; did you mean 'inner.depth'?"),
        ({"inner": {"dept": 3}}, "job.params.inner.dept: unknown key; did you mean 'depth'?"),
        (
            {"layers": [{"depth": 1}, {"dept": 3}]},
            "job.params.layers.1.dept: unknown key; did you mean 'depth'?",
        ),
        ({"width": "wide"}, "job.params.width: got 'wide', wanted a whole number"),
        ({"width": 1.5}, "job.params.width: got 1.5, wanted a whole number"),
        ({"width": None}, "job.params.width: got null, wanted a whole number"),
        ({"width": 3}, "job.params.width: got 3, wanted an even width"),
        ({"rate": 2}, "job.params.rate: got 2, wanted at most 1"),
        ({"sizes": [1]}, "job.params.sizes: got [1], wanted at least 2 values"),
        ({"shape": "square"}, "job.params.shape: got 'square', wanted 'round'"),
        ({"inner": 3}, "job.params.inner: got 3, wanted a mapping of fields: depth"),
        ({"head": {"siz": 3}}, "job.params.head.siz: unknown key; did you mean 'size'?"),
        ({"head": {"size": "x"}}, "job.params.head.size: got 'x', wanted a whole number"),
        ({"augment": {"kind": "blur"}}, "job.params.augment.kind: got 'blur', wanted 'flip' or 'crop'"),
        (
            {"augment": {"kind": "crop", "size": "x"}},
            "job.params.augment.size: got 'x', wanted a whole number",
        ),
        (
            {"augment": {"kind": "crop", "siz": 3}},
            "job.params.augment.siz: unknown key; did you mean 'size'?",
        ),
        ({"layers": {}}, "job.params.layers: got {}, wanted a list"),
    ],
)
def test_wrong_params_are_told_what_is_wanted(params: dict[str, object], message: str, jobs: str) -> None:
    assert refusal(f"{jobs}:Digits", SpecError, **params) == message


def test_params_that_are_missing_are_named(jobs: str) -> None:
    assert refusal(f"{jobs}:Needy", SpecError) == "job.params.classes: missing, and it has no default"


def test_a_job_without_params_of_its_own_takes_none(module: Write) -> None:
    use = module(SOURCE + "class Plain(Whole): pass") + ":Plain"
    assert isinstance(load_job(use, {}), Job)
    assert refusal(use, SpecError, width=3) == "job.params.width: unknown key"


THREADS = """
import torch
from lockstep.threads import library_threads

def threads():
    return [torch.get_num_threads(), library_threads()]

IMPORTED = threads()

class Counting(Whole):
    def __init__(self, params):
        super().__init__(params)
        self.made = threads()
"""


def test_a_job_is_imported_and_made_with_one_thread(module: Write) -> None:
    """What it computes then, such as a basis, is the same on any number of cores, whatever the libraries have outside."""
    name = module(SOURCE + THREADS)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadpoolController().limit(limits=2, user_api="blas"):
            job = load_job(f"{name}:Counting", {})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert (sys.modules[name].IMPORTED, job.made) == ([1, 1], [1, 1])


@pytest.mark.parametrize("checked", ["TIMESTAMP", "UNCHECKED_HASH"])
@pytest.mark.parametrize("place", ["", "elsewhere"])
def test_a_module_is_imported_as_its_file_is_now_whatever_bytecode_lies_beside_it(
    checked: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes bytecode of the same second and size for it, as after `cp -p`: the run would train what its identity does not have."""
    for folder in (tmp_path, tmp_path / place):
        folder.mkdir(exist_ok=True)
        monkeypatch.syspath_prepend(folder)
    (tmp_path / "edited_job.py").write_text(
        f"import importlib\n{SOURCE}class Edited(Whole):\n    edited = importlib.import_module('edited_' + 'width').WIDTH\n"
    )
    path, second = tmp_path / place / "edited_width.py", 1_700_000_000
    for width in (3, 4):
        path.write_text(f"WIDTH = {width}\n")
        os.utime(path, (second, second))
        for module in ("edited_job", "edited_width"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        if width == 3:
            py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode[checked])
        assert load_job("edited_job:Edited", {}).edited == width  # type: ignore[attr-defined]
    job = load_job("edited_job:Edited", {})
    assert str(path) in imported_by("edited_job:Edited", job).paths
    path.write_text("WIDTH = 5\n")
    with raises(problems.SOURCE_CHANGED, got=path):  # the process has what it held before
        imported_by("edited_job:Edited", job)
    path.write_text("WIDTH = 4\n")
    os.utime(path, (second, second))
    control = {"__name__": "control"}
    monkeypatch.setattr(SourceFileLoader, "get_code", lockstep.job.source._read_module)
    monkeypatch.delitem(sys.modules, "edited_width")
    exec("from edited_width import WIDTH", control)
    assert control["WIDTH"] == 3  # what Python itself takes it for


@pytest.mark.parametrize("edited", ["edited_later.py", "beside_edited.py"])
def test_a_job_that_was_changed_after_its_import_has_no_identity(
    edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be that of the new source, and a resume, which trains that, would go on with other bits and be none the wiser."""
    monkeypatch.syspath_prepend(tmp_path)
    path, beside = tmp_path / "edited_later.py", tmp_path / "beside_edited.py"
    for module in (path.stem, beside.stem):
        monkeypatch.delitem(sys.modules, module, raising=False)
    path.write_text(f"from beside_edited import WIDTH\n{SOURCE}class Edited(Whole): ...\n")
    beside.write_text("WIDTH = 3\n")
    spec = load_spec({"job": {"use": "edited_later:Edited"}})
    import_module(path.stem)  # as a script does that trains its class
    load_job(spec.job.use, {})
    before, content = identity_fields(spec, {}), (tmp_path / edited).read_text()
    (tmp_path / edited).write_text(f"{content}MORE = 1\n")
    load_job(spec.job.use, {})  # what was imported first is there still
    with raises(problems.SOURCE_CHANGED, got=re.compile(f"{edited}$")):
        identity_fields(spec, {})
    (tmp_path / edited).write_text(content)
    assert identity_fields(spec, {}) == before
    path.unlink()
    with raises(problems.SOURCE_CHANGED):
        identity_fields(spec, {})


def test_a_job_that_was_imported_anew_after_a_change_is_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    spec = load_spec({"job": {"use": "imported_anew:Edited"}})
    digests = set[str]()
    for width in (3, 4):
        (tmp_path / "imported_anew.py").write_text(f"{SOURCE}class Edited(Whole):\n    width = {width}\n")
        monkeypatch.delitem(sys.modules, "imported_anew", raising=False)
        load_job(spec.job.use, {})
        digests.add(identity_fields(spec, {})["job.source"])
    assert len(digests) == 2
