"""The first minutes: versions, completion, and a folder that `lockstep init` writes and that trains as it is."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.calls.problems import STARTER_UNWRITABLE
from lockstep.calls.starter import KINDS, SCHEMA_FILE, init
from lockstep.spec.loading import load_spec
from lockstep.spec.schema import spec_schema
from tests.forked import lockstep
from tests.in_process import here
from tests.unit.cli.test_command import ROOT, command, environment

FILES = [".gitignore", "README.md", "job.py", SCHEMA_FILE, "train.yaml"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def trained(folder: Path, *overrides: str) -> dict[str, Any]:
    """The result of the spec that stands in `folder`, trained there."""
    process = lockstep("train", "train.yaml", "--local", "--json", "record.uri=off", *overrides, cwd=folder)
    out, err = process.communicate(timeout=300)
    assert process.wait() == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.parametrize(
    ("kind", "overrides", "metric", "learnt"),
    [
        pytest.param(
            "classifier",
            ["length.epochs=1"],
            "eval/accuracy",
            lambda share: share > 0.5,
            marks=pytest.mark.scenario,
        ),
        pytest.param("classifier", [], "eval/accuracy", lambda share: share > 0.9, marks=pytest.mark.exact),
        pytest.param("gpt", [], "eval/bits_per_character", lambda bits: bits < 1.5, marks=pytest.mark.exact),
    ],
    ids=["one-epoch", "classifier", "gpt"],
)
def test_what_init_writes_trains_and_twice_to_the_same_bits(
    kind: str, overrides: list[str], metric: str, learnt: Callable[[float], bool], tmp_path: Path
) -> None:
    """G1; another seed is the negative control. Of four classes chance is right in a quarter, of 30 characters it costs 4.9 bits."""
    init(tmp_path / "first", kind)
    one, again = (trained(tmp_path / "first", *overrides) for _ in range(2))
    other = trained(tmp_path / "first", *overrides, "seed=2")
    assert one["weights_digest"] == again["weights_digest"] != other["weights_digest"]
    assert one["metrics"] == again["metrics"] != other["metrics"]
    assert one["warnings"] == []
    assert learnt(one["metrics"][metric])


@pytest.mark.parametrize("kind", KINDS)
def test_init_writes_a_folder_whose_spec_loads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = here(monkeypatch, capfd, tmp_path, "init", "first", "--kind", kind)
    assert (code, err) == (0, "")
    assert "cd first && lockstep train train.yaml --local" in out
    assert names(tmp_path / "first") == FILES
    assert names(tmp_path) == ["first"]
    assert load_spec(tmp_path / "first" / "train.yaml").name == "first"
    assert json.loads((tmp_path / "first" / SCHEMA_FILE).read_text()) == spec_schema()
    assert f"$schema={SCHEMA_FILE}\n" in (tmp_path / "first" / "train.yaml").read_text()


@pytest.mark.parametrize("name", ["1e3", 'a "first": run', "null", "größer"])
def test_whatever_the_folder_is_called_the_run_is_called_so(name: str, tmp_path: Path) -> None:
    init(tmp_path / name)
    assert load_spec(tmp_path / name / "train.yaml").name == name


def unread(path: Path) -> tuple[int, ...]:
    """What a write changes, and a look does not: the time of the last look is left out."""
    found = path.lstat()
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_init_overwrites_nothing(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and everything as it was."""
    taken = tmp_path / "taken"
    if there == "folder":
        taken.mkdir()
    elif there == "file":
        taken.write_text("mine")
    else:
        taken.symlink_to(tmp_path / "nowhere")
    before = unread(taken)
    code, out, err = here(monkeypatch, capfd, tmp_path, "init", "taken")
    assert (code, out) == (2, "")
    assert err == "lockstep: init: 'taken' exists already; give a name that is free\n"
    assert names(tmp_path) == ["taken"]
    assert unread(taken) == before
    assert there != "folder" or names(taken) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere/first"], "there is no folder"),
        (["first", "--kind", "clasifier"], "kind: got 'clasifier', wanted classifier or gpt"),
        (["a\tb"], "wanted a name without"),
        ([""], "init: got '', wanted the name of the folder to make"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, out, err = here(monkeypatch, capfd, tmp_path, "init", *words)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert names(tmp_path) == []


def test_a_disk_that_is_full_halfway_leaves_nothing(tmp_path: Path) -> None:
    """The schema is larger than a file may become here; what was written before it is gone again."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    done = subprocess.run(
        command("init", "first"),
        cwd=tmp_path,
        env=environment(PYTHONDONTWRITEBYTECODE="1"),
        preexec_fn=small_files,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    error = STARTER_UNWRITABLE(folder="first", got="File too large")
    assert done.stderr == f"lockstep: {error}\n"
    assert names(tmp_path) == []


# --- versions and completion ------------------------------------------------------------------------------


def test_versions_are_told_without_importing_what_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = here(monkeypatch, capfd, tmp_path, "--version", "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found) == ["lockstep", "python", "torch", "ray", "mlflow"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    text = here(monkeypatch, capfd, tmp_path, "--version")[1]
    assert [line.split() for line in text.splitlines()] == [
        [name, *number.split()] for name, number in found.items()
    ]
    program = "import sys; from lockstep.cli.main import app; app(['--version'], standalone_mode=False); print(sorted({'torch', 'ray', 'mlflow'} & {*sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("lockstep sch", ["schema"]),
        ("lockstep train train.yaml --loc", ["--local"]),
        ("lockstep train tr", []),  # bash completes files by itself
    ],
)
def test_bash_completes_commands_and_options(words: str, wanted: list[str]) -> None:
    """What the script of `lockstep --show-completion` calls."""
    program = "import sys; sys.argv = ['lockstep']; from lockstep.cli.entry import run; run()"
    asked = {
        "_LOCKSTEP_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(**asked),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == wanted
