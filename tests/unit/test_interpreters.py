"""An interpreter that Lockstep starts imports Python's own modules, whatever lies in the folder in which it starts."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.interpreters import job_words, library_environment, library_words

FOLDER = """
import json, sys

def main():
    import random, typing
    print(json.dumps({"path": sys.path, "files": [random.__file__, typing.__file__], "words": sys.argv[1:]}))
"""

OWN = ("random", "typing", "json", "queue", "lockstep")


@pytest.fixture
def hiding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: it is searched first, and `PYTHONPATH` has it too. Any of its files ends the interpreter that imports it."""
    for name in OWN:
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "told_of_itself.py").write_text(FOLDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(lockstep.__file__).parents[1]}")
    return tmp_path


def told(words: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_process_without_the_job_searches_the_jobs_folder_last(hiding: Path) -> None:
    answer = told(library_words("told_of_itself", "a", "b"), library_environment())
    assert answer["words"] == ["a", "b"]
    assert [Path(file).parent for file in answer["files"]] == [Path(os.__file__).parent] * 2
    assert str(hiding) in answer["path"]
    assert answer["path"].index(str(hiding)) > answer["path"].index(str(Path(os.__file__).parent))
    assert set(answer["path"]) >= {path for path in sys.path if path}


def test_the_control_dies_of_such_a_file(hiding: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import random"], check=False)
    assert done.returncode == 7


def test_a_process_with_the_job_searches_what_this_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told_of_itself.py").write_text(FOLDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    answer = told(job_words("told_of_itself"), dict(os.environ))
    assert answer["path"] == [path for path in sys.path if path]


def test_the_variables_are_those_of_this_process_without_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", "/a", str(tmp_path), "/b"]))
    assert library_environment() == {**os.environ, "PYTHONPATH": f"/a{os.pathsep}/b"}
    monkeypatch.setenv("PYTHONPATH", ".")
    assert "PYTHONPATH" not in library_environment()


RAYS_OWN = ("clusters/ray_internals/fork_server.py", "clusters/warm_server.py")
"""What stands in for Ray's own workers, whose first entry of the search path is another one anyway."""


def test_no_interpreter_is_started_that_searches_the_current_folder_first() -> None:
    """`python -c` and `python -m` put it before all others, `-P` and `-I` do not."""
    package, wrong = Path(lockstep.__file__).parent, []
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).as_posix() in RAYS_OWN:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                words = [word.value for word in node.elts if isinstance(word, ast.Constant)]
                if {"-c", "-m"} & {*words} and not {"-P", "-I"} & {*words}:
                    wrong.append(f"{file}:{node.lineno}")
    assert wrong == []
