"""A file beside the job that has the name of a module which Lockstep needs is told at once; any other is the job's own affair."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lockstep.calls.subprocess_call import apart
from lockstep.driver.options import RunOptions
from lockstep.errors import SpecError
from lockstep.job import problems
from lockstep.job.job_folder import refuse_hidden_modules, search_job_folder
from lockstep.job.loading import load_job
from tests.in_process import here
from tests.raised import raises

SPEC = "job: {use: 'tests.distributed.small_jobs:Plain'}\nrecord: {uri: off}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("random.py", "Python's own module 'random'"),
        ("queue.py", "Python's own module 'queue'"),
        ("logging/__init__.py", "Python's own module 'logging'"),
        ("typing.abi3.so", "Python's own module 'typing'"),
        ("torch.py", "the library 'torch', which Lockstep needs"),
        ("yaml/__init__.py", "the library 'yaml', which Lockstep needs"),
        ("sqlalchemy.py", "the library 'sqlalchemy', which Lockstep needs"),
        ("lockstep.py", "Lockstep itself"),
    ],
)
def test_a_file_that_hides_a_needed_module_is_told(folder: Path, name: str, hidden: str) -> None:
    """Whether or not that module is imported by now, and before the folder is searched."""
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    before = list(sys.path)
    with raises(problems.HIDES_MODULE, file=str(file), hidden=hidden):
        search_job_folder()
    assert sys.path == before


@pytest.mark.parametrize(
    "name",
    [
        "job.py",
        "test.py",  # of which Lockstep's libraries need none
        "example.py",
        "time.py",  # is in the interpreter, and found before any file
        "os.py",
        "pytest.py",  # installed here, and nothing of Lockstep's
        "random.txt",
        "queue/job.py",  # a folder without an `__init__` hides nothing
        "jobs/random.py",
    ],
)
def test_another_file_is_the_jobs_own(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    search_job_folder()
    assert sys.path[0] == str(folder)


def test_the_folder_that_a_module_comes_from_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the source root of Lockstep itself, or through a link to it."""
    root = Path(problems.__file__).parents[2]
    monkeypatch.chdir(root)
    refuse_hidden_modules()


def test_a_linked_package_hides_nothing(folder: Path) -> None:
    (folder / "lockstep").symlink_to(Path(problems.__file__).parents[1])
    refuse_hidden_modules()


def test_the_folder_comes_first_where_that_is_asked_for(folder: Path) -> None:
    sys.path.append(str(folder))
    before = list(sys.path)
    search_job_folder()
    assert sys.path == before
    search_job_folder(first=True)
    search_job_folder(first=True)
    assert sys.path == [str(folder), *before]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "spec.yaml", "--local"],
        ["train", "spec.yaml", "--dry-run"],
        ["resume", "f" * 32],
        ["check", "spec.yaml"],
        ["estimate", "spec.yaml"],
        ["bench", "spec.yaml"],
        ["lr-find", "spec.yaml"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_a_command_refuses_in_one_line(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "spec.yaml").write_text(SPEC)
    (folder / "random.py").touch()
    code, out, err = here(monkeypatch, capfd, folder, *words, "--json")
    told = json.loads(out)
    assert (told["code"], code) == (problems.HIDES_MODULE.code, SpecError.exit_code)
    assert err == f"lockstep: {told['error']}\n"
    assert {path.name for path in folder.iterdir()} == {"spec.yaml", "random.py"}


def test_a_call_in_a_process_of_its_own_is_refused_before_that_starts(folder: Path) -> None:
    (folder / "random.py").touch()
    with raises(problems.HIDES_MODULE):
        apart(print, RunOptions())  # type: ignore[arg-type]


def test_a_job_whose_name_is_pythons_own_is_told_so(folder: Path) -> None:
    file = folder / "time.py"
    file.write_text("import lockstep\nclass Tiny(lockstep.Job): ...\n")
    with raises(problems.OTHER_MODULE, module="time", got="Tiny", whose="Python's own", file=str(file)):
        load_job("time:Tiny", {})
