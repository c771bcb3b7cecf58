"""A job's source is found without running it: all of it enters the identity, and what is missing is told at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import JobImportError
from lockstep.job.recorded_source import imported_from, shadows, source_digest
from lockstep.job.source import check_job_source, job_source_digest, job_sources


def forget(folder: Path) -> None:
    """Take the modules out that were imported from below a folder."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source root with a package whose job uses a sibling, a relative import and a third-party library."""
    package = tmp_path / "shapes_of_source"
    (package / "nets").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "nets" / "__init__.py").write_text("")
    (package / "nets" / "conv.py").write_text("WIDTH = 3\n")
    (package / "data.py").write_text("import numpy\n")
    (package / "unused.py").write_text("raise SystemExit\n")
    (package / "job.py").write_text(
        "import torch\nfrom shapes_of_source.data import x\nfrom .nets import conv\nclass Mine: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.startswith("shapes_of_source")]:
        del sys.modules[name]


def test_sources_are_the_job_and_what_it_imports_from_its_own_root(project: Path) -> None:
    found = job_sources("shapes_of_source.job:Mine")
    assert {path.relative_to(project).as_posix() for path in found.values()} == {
        "__init__.py", "job.py", "data.py", "nets/__init__.py", "nets/conv.py",
    }  # fmt: skip


def test_an_installed_job_is_its_own_package_and_not_all_that_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would be torch, file by file."""
    found = []
    for folder in ("site-packages", "src"):
        root = tmp_path / folder
        for package, text in {
            "installed_job": "import beside_it\nfrom . import nets\nclass Mine: ...\n",
            "beside_it": "WIDTH = 3\n",
        }.items():
            (root / package).mkdir(parents=True)
            (root / package / "__init__.py").write_text(text)
        (root / "installed_job" / "nets.py").write_text("import beside_it\n")
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(root))
            importlib.invalidate_caches()
            found.append(set(job_sources("installed_job:Mine")))
    assert found == [
        {"installed_job", "installed_job.nets"},
        {"installed_job", "installed_job.nets", "beside_it"},
    ]


def test_a_package_in_several_folders_is_read_where_the_job_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the `jobs/` of a project beside those of another one; without its source a change of the job would go unseen."""
    for folder, name, text in (
        ("theirs", "other", ""),
        ("ours", "mine", "from parts_of_source import helper\nclass Mine: ...\n"),
        ("ours", "helper", "WIDTH = 3\n"),
    ):
        part = tmp_path / folder / "parts_of_source"
        part.mkdir(parents=True, exist_ok=True)
        (part / f"{name}.py").write_text(text)
    for folder in ("ours", "theirs"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert job_sources("parts_of_source.mine:Mine").keys() == {
        "parts_of_source.mine",
        "parts_of_source.helper",
    }
    with pytest.raises(JobImportError, match="has no 'Mina'"):
        check_job_source("parts_of_source.mine:Mina")


def test_a_change_anywhere_in_the_source_changes_the_digest(project: Path) -> None:
    before = job_source_digest("shapes_of_source.job:Mine")
    (project / "unused.py").write_text("")
    assert job_source_digest("shapes_of_source.job:Mine") == before
    (project / "nets" / "conv.py").write_text("WIDTH = 4\n")
    assert job_source_digest("shapes_of_source.job:Mine") != before


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("shapes_of_source.job", 'wanted "package.module:Class"'),
        ("shapes_of_source/job.py:Mine", 'wanted "package.module:Class"'),
        ("shapes_of_source.jobs:Mine", "there is no module 'shapes_of_source.jobs'"),
        ("nowhere_at_all.job:Mine", "there is no module 'nowhere_at_all.job'"),
        ("shapes_of_source.job:Mime", "did you mean 'Mine'?"),
    ],
)
def test_what_is_not_there_is_told_without_importing_anything(project: Path, use: str, told: str) -> None:
    with pytest.raises(JobImportError, match=r"^job\.use: ") as caught:
        check_job_source(use)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_syntax_error_is_told_with_its_line(project: Path) -> None:
    (project / "job.py").write_text("x = 1\nclass Mine(:\n")
    with pytest.raises(JobImportError, match=r"job\.py, line 2: SyntaxError"):
        check_job_source("shapes_of_source.job:Mine")


def test_a_module_that_python_cannot_read_is_source_as_long_as_nobody_imports_it(project: Path) -> None:
    """Such as one for another version of Python; a change of it is a change of the source."""
    (project / "job.py").write_text("class Mine:\n    def old(self):\n        from . import legacy\n")
    (project / "legacy.py").write_text("print 'x'\n")
    assert "shapes_of_source.legacy" in job_sources("shapes_of_source.job:Mine")
    before = job_source_digest("shapes_of_source.job:Mine")
    (project / "legacy.py").write_text("print 'y'\n")
    assert job_source_digest("shapes_of_source.job:Mine") != before


def test_of_a_package_and_a_module_of_one_name_the_package_is_the_source(project: Path) -> None:
    (project / "nets.py").write_text("left over\n")
    found = job_sources("shapes_of_source.job:Mine")["shapes_of_source.nets"]
    assert str(found) == importlib.import_module("shapes_of_source.nets").__file__


def test_a_name_that_is_imported_or_assigned_is_left_to_the_import(project: Path) -> None:
    (project / "job.py").write_text("from torch import nn as Mine\nclass Other: ...\n")
    check_job_source("shapes_of_source.job:Mine")


def test_a_job_of_lockstep_has_the_files_of_its_room_alone() -> None:
    """The rest is known by Lockstep's version, which the identity has; and a recorded source must not bring a second Lockstep."""
    found = job_sources("lockstep.hf:CausalLM")
    assert {"lockstep.hf", "lockstep.hf.causal_lm", "lockstep.hf.tokens"} <= found.keys()
    assert all(name.startswith("lockstep.hf") for name in found)


def test_the_recorded_source_of_a_job_of_lockstep_is_what_is_imported() -> None:
    paths = job_sources("lockstep.hf:CausalLM")
    root = Path(lockstep.__file__).parents[1]
    source = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths.values()}
    source["lockstep/hf/causal_lm.py"] += b"\nRECORDED = True\n"
    with imported_from(source):
        module = importlib.import_module("lockstep.hf.causal_lm")
        assert module.RECORDED
        assert issubclass(module.CausalLM, lockstep.Job)
        assert job_source_digest("lockstep.hf:CausalLM") == source_digest(source)
    assert not hasattr(importlib.import_module("lockstep.hf.causal_lm"), "RECORDED")


def test_a_recorded_source_stands_in_for_no_other_module_of_lockstep_and_none_of_python() -> None:
    source = dict.fromkeys(
        (
            "json.py",
            "colorsys/__init__.py",
            "lockstep/__init__.py",
            "lockstep/proof/verification.py",
            "jsons.py",
        ),
        b"RECORDED = True\n",
    )
    assert shadows(source) == [*source][:-1]
    with imported_from(source):
        for name in ("json", "colorsys", "lockstep", "lockstep.proof.verification"):
            assert not hasattr(importlib.import_module(name), "RECORDED"), name
        assert importlib.import_module("jsons").RECORDED
