"""Mutation testing: does a test fail where a module has a small mistake? python -m tests.mutants [--sample 20] [--seed 0] [MODULE …]

Each mutant is written into a copy of the working tree, and the test files that `modules.COVERED` names for its module are run there until one
fails: first what they have in the default run, then their scenarios. Answers are kept in `.mutants/answers.jsonl`: a run that was interrupted goes on, and one after a change asks again only what the change
can answer anew. Without MODULE all modules of the map are asked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutants.modules import COVERED, EQUIVALENT
from tests.mutants.mutations import Mutant, mutants, sampled

ROOT = Path(__file__).parents[2]
ANSWERS = Path(".mutants") / "answers.jsonl"
STAGES = ("", "scenario and not exact")
"""The tests of a change before it lands: the default run and the scenarios, as pytest's `-m` names them."""

NO_TESTS = 5
"""Pytest's exit code where a stage has none of the tests."""

SLACK_S = 60.0
"""How much longer than three times the sound run a mutant may take: one that hangs is noticed, too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask for each sampled mutant whether a test fails, and print the score by module. Exit code 1 where one survives that is no equivalent."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "modules", nargs="*", metavar="MODULE", help="below platform/lockstep, such as training/loop.py"
    )
    parser.add_argument("--sample", type=int, default=20, help="mutants of each module; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutants whose name has this text")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.modules) - COVERED.keys())
    if unknown:
        parser.error(f"got {unknown[0]!r}, wanted some of: {', '.join(COVERED)}")
    chosen = {module: _drawn(module, given) for module in given.modules or COVERED}
    if given.list:
        for module, drawn in chosen.items():
            print(*(f"{module}:{mutant.line}: {mutant.name}" for mutant in drawn), sep="\n")
        return 0
    answers = Answers(ROOT / ANSWERS)
    with copied_tree() as tree:
        for module, drawn in chosen.items():
            ask(tree, module, drawn, answers)
    return report(chosen, answers)


def _drawn(module: str, given: argparse.Namespace) -> list[Mutant]:
    every = [one for one in mutants(_source(ROOT, module).read_text()) if given.only in one.name]
    return sampled(module, every, given.sample or len(every), given.seed)


def _source(tree: Path, module: str) -> Path:
    return tree / "platform" / "lockstep" / module


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the files that git knows or would add: the working tree itself never has a mistake in it."""
    with tempfile.TemporaryDirectory(prefix="lockstep-mutants-") as folder:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True,
        )  # fmt: skip
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder)


class Answers:
    """What was asked before. A mutant that was killed stays so as long as its source is the same; one that survived also needs the same tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._known = {(one["module"], one["name"]): one for one in map(json.loads, lines)}

    def get(self, module: str, mutant: Mutant) -> dict[str, Any] | None:
        """The answer, where it still holds."""
        known = self._known.get((module, mutant.name))
        if known is None or known["source"] != _digest(mutant.source.encode()):
            return None
        return known if known["killed"] or known["tests"] == tests_digest(module) else None

    def put(self, module: str, mutant: Mutant, *, killed: bool, by: str, seconds: float) -> None:
        """Keep an answer."""
        answer = {
            "module": module,
            "name": mutant.name,
            "source": _digest(mutant.source.encode()),
            "tests": tests_digest(module),
            "killed": killed,
            "by": by,
            "seconds": round(seconds, 1),
        }
        self._known[module, mutant.name] = answer
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(answer) + "\n")


@cache
def tests_digest(module: str) -> str:
    """Of the test files that cover a module, as they were when it was first asked for."""
    return _digest(b"".join((ROOT / name.partition("::")[0]).read_bytes() for name in COVERED[module]))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def ask(tree: Path, module: str, drawn: Sequence[Mutant], answers: Answers) -> None:
    """Run the tests of a module with each of its mutants that has no answer yet."""
    left = [
        one for one in drawn if one.name not in EQUIVALENT.get(module, {}) and not answers.get(module, one)
    ]
    if not left:
        return
    path = _source(tree, module)
    sound = path.read_text()

    @cache
    def limit_s(stage: str) -> float:
        """How long a stage may take. Its tests are first run without a mistake, once one of the mutants needs them."""
        code, by, seconds = tried(tree, module, stage, None)
        if code not in (0, NO_TESTS):
            raise SystemExit(f"mutants: the tests of {module} fail without a mistake: {by}")
        print(f"  {seconds:.0f} s for the sound run of {stage or 'the default tests'}", flush=True)
        return 3 * seconds + SLACK_S

    print(f"{module}: {len(left)} mutants to ask", flush=True)
    for mutant in left:
        began = time.monotonic()
        for stage in STAGES:
            limit = limit_s(stage)
            path.write_text(mutant.source)
            try:
                code, by, _ = tried(tree, module, stage, limit)
            finally:
                path.write_text(sound)
            if killed := code not in (0, NO_TESTS):
                break
        if killed and code not in (1, None):
            by = f"pytest ended with {code}: {by}"
        answers.put(module, mutant, killed=killed, by=by, seconds=time.monotonic() - began)
        print(f"  {'killed  ' if killed else 'SURVIVED'} {module}:{mutant.line}: {mutant.name}", flush=True)


def tried(tree: Path, module: str, stage: str, limit_s: float | None) -> tuple[int | None, str, float]:
    """Run the tests that a module has in a stage: pytest's exit code (None past the limit), the first test that failed, and the seconds."""
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *(["-m", stage] if stage else []),
        *COVERED[module],
    ]
    roots = os.pathsep.join([str(tree / "platform"), str(tree)])
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": roots, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        # A group of its own: what a test has started ends with it.
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    by = "it hangs" if code is None else (failed or lines or ["no output"])[0]
    return code, by[:200], time.monotonic() - began


def report(chosen: dict[str, list[Mutant]], answers: Answers) -> int:
    """Print the score of each module, and the survivors. Returns the exit code."""
    survivors = []
    print(f"\n{'module':32} {'asked':>6} {'killed':>7} {'equal':>6} {'left':>5} {'score':>6}")
    for module, drawn in chosen.items():
        equal = [one for one in drawn if one.name in EQUIVALENT.get(module, {})]
        answered = [(one, known) for one in drawn if one not in equal and (known := answers.get(module, one))]
        killed = sum(known["killed"] for _, known in answered)
        survivors += [f"{module}:{one.line}: {one.name}" for one, known in answered if not known["killed"]]
        left = len(drawn) - len(equal) - len(answered)
        score = f"{killed / len(answered):.0%}" if answered else "-"
        print(f"{module:32} {len(answered):6} {killed:7} {len(equal):6} {left:5} {score:>6}")
    print(*(["", "survivors:", *survivors] if survivors else []), sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
