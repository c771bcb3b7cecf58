"""Calls that read files: noted for the job's code alone, at no cost to others, by functions that stand in for Python's own everywhere."""

from __future__ import annotations

import builtins
import copy
import io
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lockstep.job.inputs import external_reads
from lockstep.job.inputs.external_reads import (
    ABSENT,
    MOST_FILES,
    NOT_REGULAR,
    TOO_MANY_NAMES,
    WHOLE_BYTES,
    ExternalReads,
    content_of,
    merged,
    names_of,
)
from lockstep.job.inputs.host_queries import answers, asked, unrepeatable
from lockstep.job.inputs.system_calls import watch_calls, watch_modules
from lockstep.job.inputs.variables import Reads, variables_noted
from tests.unit.job.test_source import forget

MODULE = """
import glob, io, json, os, pathlib, subprocess
HERE = pathlib.Path(__file__).parent
def read(name):
    with open(HERE / name) as file: return file.read()
def write(name):
    with open(HERE / name, "w") as file: file.write("x")
def descriptor(name):
    os.close(os.open(HERE / name, os.O_RDONLY))
    with open(os.open(HERE / name, os.O_RDONLY)) as file: return file.read()
def listed(): return sorted(os.listdir(HERE)), sorted(one.name for one in os.scandir(HERE)), glob.glob(str(HERE / "*"))
def imports(): import colorsys, PIL.ImageColor
def program(): return subprocess.run(["true"]), os.system("true")
def by_numpy(name):
    import numpy
    return numpy.load(HERE / name)
def hidden_of_library():
    import numpy
    try: numpy.load(HERE / ".cache" / "a.npy")
    except OSError: pass
def own_source():
    with open(os.__file__) as file: return file.read(10)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    watch_calls()
    watch_modules()
    (tmp_path / "job_of_calls.py").write_text(MODULE)
    (tmp_path / "a.txt").write_text("1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield __import__("job_of_calls")
    forget(tmp_path)


@contextmanager
def noting() -> Iterator[ExternalReads]:
    """Note what the job does in the block. A test's own code counts as a job's."""
    reads = Reads()
    with variables_noted(reads):
        yield reads.outside


def test_what_the_job_opens_lists_and_starts_is_noted(module: Any) -> None:
    with noting() as noted:
        module.read("a.txt"), module.descriptor("a.txt"), module.listed(), module.program()
    assert list(noted.files) == [str(module.HERE / "a.txt")]
    assert list(noted.folders) == [str(module.HERE)]
    assert [*noted.programs] == ["true"]
    assert noted.programs["true"].startswith("job_of_calls.py:")


def test_what_others_open_is_not(module: Any) -> None:
    """A library for itself, an import, and Lockstep."""
    import numpy as np

    np.save(module.HERE / "b.npy", np.ones(1))
    with noting() as noted:
        module.imports(), module.hidden_of_library(), module.own_source()
        content_of(str(module.HERE / "a.txt"))
    assert noted.files == {}
    with noting() as noted:
        module.by_numpy("b.npy")
    assert list(noted.files) == [str(module.HERE / "b.npy")]


def test_nothing_is_noted_where_no_run_is_on(module: Any) -> None:
    with mock.patch.object(ExternalReads, "read") as read:
        module.read("a.txt")
    read.assert_not_called()


def test_what_the_job_writes_is_no_input_but_what_it_makes_of_it(module: Any) -> None:
    with noting() as noted:
        for name in ("a.txt", "cache.txt"):
            module.write(name)
            module.read(name)
    found = merged([noted])
    assert found.steady == {}
    assert set(found.others) == {str(module.HERE / "a.txt"), str(module.HERE / "cache.txt")}
    (module.HERE / "cache.txt").unlink()
    assert set(merged([noted]).others) == {str(module.HERE / "a.txt")}


def test_the_functions_stand_in_for_pythons_own(module: Any, tmp_path: Path) -> None:
    for function in (builtins.open, os.open, os.listdir, os.scandir, io.open_code):
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function
        assert "built-in function" in repr(function)
        assert function.__doc__
    assert builtins.open is io.open
    assert os.open in os.supports_dir_fd
    assert {os.listdir, os.scandir} <= os.supports_fd
    assert shutil.rmtree.avoids_symlink_attacks

    class Opener:
        opener = open

    with Opener().opener(tmp_path / "a.txt") as file:  # no method of the class
        assert file.read() == "1"
    assert subprocess.run([sys.executable, "-c", "import lockstep, shutil, os; assert shutil.rmtree.avoids_symlink_attacks"], check=True).returncode == 0  # fmt: skip


def test_whoever_has_replaced_open_before_is_called_still() -> None:
    script = "import builtins\nown = builtins.open\ncalls = []\ndef mine(*a, **k):\n    calls.append(a)\n    return own(*a, **k)\nbuiltins.open = mine\nimport lockstep\nopen('/dev/null').close()\nassert calls\n"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_only_the_first_files_are_looked_at(module: Any) -> None:
    """A data set of a hundred thousand files costs what 256 do."""
    for i in range(MOST_FILES + 50):
        (module.HERE / f"{i}.bin").write_bytes(b"x")
    with mock.patch.object(external_reads, "content_of", wraps=content_of) as looked, noting() as noted:
        noted.early = False
        for i in [*range(MOST_FILES + 50)] * 2:
            module.read(f"{i}.bin")
    assert looked.call_count == len(noted.files) == MOST_FILES
    assert noted.full


def test_only_so_many_bytes_are_looked_at_while_a_run_computes(module: Any) -> None:
    for i in range(6):
        with (module.HERE / f"{i}.bin").open("wb") as file:
            file.truncate(WHOLE_BYTES)
    with noting() as noted:
        noted.early = False
        for i in range(6):
            noted.read(str(module.HERE / f"{i}.bin"))
    assert len(noted.files) == 4


def test_the_content_of_a_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    os.utime(tmp_path / "b", (1, 1))
    assert content_of(str(tmp_path / "a")) == content_of(str(tmp_path / "b"))
    (tmp_path / "b").write_text("2")
    assert content_of(str(tmp_path / "a")) != content_of(str(tmp_path / "b"))
    assert content_of(str(tmp_path / "nowhere")) == (ABSENT, 0)
    assert content_of("/dev/null") == content_of(str(tmp_path)) == (NOT_REGULAR, 0)
    assert content_of("a\0b") == (ABSENT, 0)


@pytest.mark.parametrize("at", [0, WHOLE_BYTES * 2 - 1])
def test_a_large_file_counts_by_its_size_and_some_of_its_blocks(tmp_path: Path, at: int) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(WHOLE_BYTES * 2)
    before, size = content_of(str(path))
    assert size <= 1 << 20
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"x")
    assert content_of(str(path))[0] != before
    with path.open("r+b") as file:
        file.truncate(WHOLE_BYTES * 2 + 1)
    assert content_of(str(path))[0] != before


def test_the_names_in_a_folder_have_no_order_and_hidden_ones_do_not_count(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("")
    before = names_of(str(tmp_path))
    (tmp_path / ".hidden").write_text("")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "runs").mkdir()
    assert names_of(str(tmp_path), {str(tmp_path / "runs")}) == before
    assert names_of(str(tmp_path)) != before
    assert names_of(str(tmp_path / "nowhere")) is ABSENT
    with mock.patch.object(external_reads, "MOST_NAMES", 1):
        assert names_of(str(tmp_path)) == TOO_MANY_NAMES


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import os\nos.getcwd()", {"os.getcwd"}),
        ("import os as o\ndef f(): return o.getcwd", {"os.getcwd"}),
        ("from os import getcwd as g\ng()", {"os.getcwd"}),
        ("from pathlib import Path\nPath.cwd()", {"pathlib.Path.cwd"}),
        ("import sys\nprint(sys.argv[1:])", {"sys.argv"}),
        ("import datetime\ndatetime.datetime.now()", {"datetime.datetime.now"}),
        ("import posix\nposix.environ", {"posix.environ"}),
        ("import multiprocessing as m\nm.cpu_count()", {"multiprocessing.cpu_count"}),
        ("try: 1\nexcept RecursionError: 2", {"builtins.RecursionError"}),
        ("class Graph:\n  def node(self): ...\ng = Graph()\ng.node(); argv = 1; g.getcwd()", set()),
        ("import time\nx = time.sleep", set()),
        ("def f(:", set()),
    ],
)
def test_what_code_asks_its_process_is_read_from_its_source(
    tmp_path: Path, code: str, names: set[str]
) -> None:
    (tmp_path / "a.py").write_text(code)
    found = asked([str(tmp_path / "a.py")])
    assert set(found) == names
    assert all(place.startswith("a.py:") for place in found.values())


def test_the_answers_are_those_of_what_is_asked_alone() -> None:
    assert answers(["os.getcwd", "time.time"]) == {"working folder": os.getcwd()}  # noqa: PTH109
    assert answers([]) == {}
    assert unrepeatable(["os.getcwd", "time.time"]) == ["time.time"]


def test_a_process_id_is_another_one_in_each_process() -> None:
    """So it is compared with none, as a clock is: a job that logs it is told of nothing, and stands for another run."""
    assert unrepeatable(["os.getpid"]) == ["os.getpid"]
    assert "process id" not in answers(["os.getpid", "os.getcwd"])
