"""Reads of the environment: those that the code of a job makes are noted, in every way that Python has, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.job.inputs.variables import (
    Channel,
    Reads,
    held_now,
    is_placement,
    read_by,
    reads_of,
    variables_noted,
    watch,
)
from lockstep.job.loading import load_job
from tests.unit.job.test_source import forget

MODULE = """
import functools, os, posixpath, string, subprocess, sys, tempfile, threading
from os import environ, getenv

def item(): return os.environ["MINE"]
def get(): return os.environ.get("MINE", "0")
def getenv_(): return getenv("MINE")
def of_name(): return environ["MINE"]
def contains(): return "MINE" in os.environ
def of_bytes(): return os.environb[b"MINE"]
def of_bytes_by_name(): return os.getenvb(b"MINE")
def pop(): return os.environ.pop("MINE", None)
def expanded(): return os.path.expandvars("$MINE")
def prefix(): return [os.environ[name] for name in os.environ if name.startswith("MINE")]
def template(): return string.Template("$MINE").substitute(os.environ)
def in_thread():
    thread = threading.Thread(target=item); thread.start(); thread.join()
def compiled(): exec("import os; os.environ['MINE']")
def mapped(): return list(map(os.environ.get, ["MINE"]))
def partial(): return functools.partial(os.getenv, "MINE")()

def copied(): return os.environ.copy()
def as_dict(): return dict(os.environ)
def unpacked(): return {**os.environ, "MORE": "1"}
def items(): return [name for name, value in os.environ.items() if value == "nothing"]
def joined(): return os.environ | {"MORE": "1"}
def shown(): return repr(os.environ)
def child(): return subprocess.run([sys.executable, "-c", ""], env={**os.environ})
def of_library(): return tempfile.gettempdir(), os.get_terminal_size
def by_default(): os.environ.setdefault("OF_DEFAULT", "7")
def set_first():
    os.environ["MINE"] = "5"
    return os.environ["MINE"]
"""

SEEN = (
    "item", "get", "getenv_", "of_name", "contains", "of_bytes", "of_bytes_by_name", "pop", "expanded", "prefix", "in_thread", "compiled",
    "mapped", "partial",
)  # fmt: skip
UNSEEN = ("copied", "as_dict", "unpacked", "items", "joined", "shown", "child", "of_library", "set_first")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "readers_of_variables.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("MINE", "3")
    watch()
    yield __import__("readers_of_variables")
    forget(tmp_path)


@pytest.mark.parametrize("way", SEEN)
def test_a_read_of_the_job_is_noted_with_its_value(module: Any, way: str) -> None:
    reads = Reads()
    with variables_noted(reads):
        getattr(module, way)()
    assert reads.values == {"MINE": "3"}
    getattr(module, way)()  # of nobody's run


@pytest.mark.parametrize("way", UNSEEN)
def test_what_is_no_input_of_the_job_is_not_noted(module: Any, way: str) -> None:
    """A copy of the whole environment, such as for a process; what a library reads for itself; and what the job itself has set."""
    reads = Reads()
    with variables_noted(reads):
        getattr(module, way)()
    assert reads.values == {}


def test_a_variable_that_is_not_set_is_noted_too(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINE")
    reads = Reads()
    with variables_noted(reads):
        assert module.get() == "0"
        with pytest.raises(KeyError, match="MINE"):
            module.item()
    assert reads.values == {"MINE": None}


def test_a_default_that_the_job_sets_counts_as_if_it_had_been_set(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that a first one starts inherits it: both have one identity."""
    found = []
    for _ in range(2):
        reads = Reads()
        with variables_noted(reads):
            module.by_default()
        found.append(reads.values)
    monkeypatch.delenv("OF_DEFAULT")
    assert found == [{"OF_DEFAULT": "7"}, {"OF_DEFAULT": "7"}]


JOB = """
import os
SCALE = os.environ.get("AT_IMPORT", "1")
import lockstep
class Mine(lockstep.Job):
    placement_variables = ("WHERE",)
    def __init__(self, params):
        super().__init__(params)
        os.environ.get("IN_INIT"), os.environ.get("WHERE")
    def model(self): ...
    def train_data(self): ...
    def loss(self, model, batch): ...
"""


def test_reads_at_import_are_those_of_every_run_in_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module is imported for the first one alone."""
    (tmp_path / "reads_at_import.py").write_text(JOB)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("AT_IMPORT", "2")
    file = os.path.realpath(tmp_path / "reads_at_import.py")
    found = [read_by(load_job("reads_at_import:Mine", {}), [file]) for _ in range(2)]
    forget(tmp_path)
    assert found == [{"AT_IMPORT": "2", "IN_INIT": None, "WHERE": None}] * 2
    assert read_by(load_job("jobs.digits.job:Digits", {}), [file]) == {"AT_IMPORT": "2"}
    assert reads_of(load_job("jobs.digits.job:Digits", {})).values == {}


def test_a_job_sees_no_rank_while_it_is_imported_and_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ranked_of_variables.py").write_text(
        "import os, lockstep\nSEEN = [os.environ.get('RANK')]\nclass Mine(lockstep.Job):\n"
        "    def __init__(self, params): SEEN.append(os.environ.get('RANK'))\n"
        "    model = train_data = lambda self: None\n    def loss(self, model, batch): ...\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("RANK", "1")
    load_job("ranked_of_variables:Mine", {})
    assert sys.modules["ranked_of_variables"].SEEN == [None, None]
    assert os.environ["RANK"] == "1"
    forget(tmp_path)


def test_a_forked_process_reports_its_reads() -> None:
    channel = Channel()
    assert channel.arrived() == []
    if (pid := os.fork()) == 0:
        channel.send("ONE")
        channel.send("TWO" * 400)
        os._exit(0)
    os.waitpid(pid, 0)
    assert channel.arrived() == ["ONE", ("TWO" * 400)[:1000]]
    assert channel.arrived() == []


def test_looking_at_a_variable_is_no_read(module: Any) -> None:
    reads = Reads()
    with variables_noted(reads):
        assert held_now(["MINE", "NOWHERE"]) == {"MINE": "3", "NOWHERE": None}
    assert reads.values == {}


@pytest.mark.parametrize(
    ("name", "value", "placed"),
    [
        ("DATA_ROOT", "there", True),
        ("HOME", "/root", True),
        ("CORPUS", "/data/corpus", True),
        ("CORPUS", "s3://bucket/corpus", True),
        ("CORPUS", "wiki", False),
        ("CUDA_VISIBLE_DEVICES", "0", True),
        ("SLURM_JOB_ID", "17", True),
        ("MY_SCALE", "1", False),
        ("MY_SCALE", None, False),
        ("PATHOLOGY", "2", False),
        ("USE_FILES_FROM", "x", False),
        ("DECLARED", "x", True),
    ],
)
def test_a_variable_that_says_where_something_is_is_placement(
    name: str, value: str | None, placed: bool
) -> None:
    assert is_placement(name, value, ("DECLARED",)) == placed


def test_a_read_before_any_run_is_noted_where_lockstep_was_imported(tmp_path: Path) -> None:
    """As in a script that imports its job and trains it in its own process."""
    (tmp_path / "helper.py").write_text("import os\nSCALE = os.environ.get('MY_SCALE')\n")
    script = "import lockstep, helper, os\nfrom lockstep.job.inputs import variables\nprint([reads.values for _, reads in variables._AT_IMPORT.values()])"
    paths = os.pathsep.join([*sys.path, str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths, "MY_SCALE": "4"}, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout == "[{'MY_SCALE': '4'}]\n"
