"""One tree of errors, each a line of text that survives the way between processes."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from lockstep import errors
from lockstep.errors import FailedAt, JobError, LockstepError, Problem, SpecError, nearest
from lockstep.job.frames import place_in_job


def tree(root: type[LockstepError]) -> list[type[LockstepError]]:
    return [root, *(error for child in root.__subclasses__() for error in tree(child))]


ERRORS = [error for error in tree(LockstepError) if error.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[LockstepError]) -> None:
    """G7: Ray sends errors between processes; the person is shown the same line."""
    back = pickle.loads(pickle.dumps(kind("seed: got 'x', wanted a whole number")))
    assert type(back) is kind
    assert str(back) == "seed: got 'x', wanted a whole number"
    assert back.exit_code == kind.exit_code
    assert back.args == ("seed: got 'x', wanted a whole number",)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_with_another_message_keeps_all_that_it_says_of_itself(kind: type[LockstepError]) -> None:
    """The driver reports what failed and where, whatever is added to the line on its way."""
    error = kind("the job failed")
    error.failed_at = FailedAt("job", 7, 1, (3, 4))
    back = pickle.loads(pickle.dumps(error.with_message("the job failed; run 12")))
    assert (type(back), str(back), back.failed_at) == (kind, "the job failed; run 12", error.failed_at)


# --- errors as data ---------------------------------------------------------------------------------------

PACKAGE = Path(errors.__file__).parent


def problems() -> dict[str, Problem[Any]]:
    """Every problem of the product, by the file of its room and its name."""
    found = {}
    for file in sorted(PACKAGE.rglob("problems.py")):
        path = file.relative_to(PACKAGE)
        module = importlib.import_module(".".join(["lockstep", *path.with_suffix("").parts]))
        entries = {name: value for name, value in vars(module).items() if isinstance(value, Problem)}
        assert entries, file
        found |= {f"{path.as_posix()}:{name}": problem for name, problem in entries.items()}
    return found


PROBLEMS = problems()


def facts_of(problem: Problem[Any]) -> dict[str, str]:
    names = {name for _, name, *_ in Formatter().parse(problem.text + problem.remedy) if name}
    return {name: f"<{name}>" for name in names}


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_error_of_a_table_keeps_what_it_is_and_says_on_its_way(name: str) -> None:
    """Its code and its facts survive pickling and another message; its line is one line."""
    problem = PROBLEMS[name]
    error = problem(**facts_of(problem))
    assert type(error) is problem.error
    line = f"{error.evidence}; {error.remedy}" if error.remedy else error.evidence
    assert str(error) == line
    assert "\n" not in line
    for back in (pickle.loads(pickle.dumps(error)), error.with_message(f"{error}; run 12")):
        assert (back.code, back.facts, back.remedy, back.check) == (
            problem.code, facts_of(problem), error.remedy, problem.check
        )  # fmt: skip


def test_codes_are_unique_and_every_problem_is_raised() -> None:
    codes = [problem.code for problem in PROBLEMS.values()]
    assert len(set(codes)) == len(codes)
    files = [file for file in PACKAGE.rglob("*.py") if file.name != "problems.py"]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text())}
    assert {name for name in PROBLEMS if name.partition(":")[2] not in words} == set()


PASSED_ON = {"checks/bench.py": 3, "spec/messages.py": 1}
"""Errors whose line comes from elsewhere: from a process that a bench started, or from pydantic."""


def lines_in_place() -> dict[str, int]:
    """How many errors each file makes otherwise than of a problem."""
    sources = {file: [*ast.walk(ast.parse(file.read_text()))] for file in PACKAGE.rglob("*.py")}
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for nodes in sources.values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    kinds = {LockstepError.__name__}
    while more := {name for name, of in bases.items() if of & kinds} - kinds:
        kinds |= more
    counts = {}
    for file, nodes in sources.items():
        called = [
            node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        variables = {
            target.id
            for node in nodes
            if isinstance(node, ast.Assign)
            and any(isinstance(part, ast.Name) and part.id in kinds for part in ast.walk(node.value))
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        raised = [
            node.exc.func.id
            for node in nodes
            if isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Name)
        ]
        if made := sum(name in kinds for name in called) + sum(name in variables for name in raised):
            counts[file.relative_to(PACKAGE).as_posix()] = made
    return counts


@pytest.mark.scenario
def test_an_error_is_of_a_problem() -> None:
    """A line that is written where it is raised has no code, and the page can say something else than it."""
    assert lines_in_place() == PASSED_ON


UNTESTED = {
    # that a run has to be trained first, twice or on a cluster
    "calls/problems.py": {
        "EXECUTION_BROKE", "GUARD_OTHER_BASE", "LEARNT_BEFORE_FORK", "LEFT_OUT_ALREADY", "NOTHING_TO_FORK", "PROMOTION_BEST", "WEIGHTS_UNFIT",
    },
    "proof/problems.py": {"NO_STEP", "PROCESS_ENDED"},
    "export/problems.py": {"ANOTHER_DESCRIPTION"},
    # what Ray does
    "attempts/problems.py": {"NODE_FAILED", "NO_RESULT", "UNWRITTEN"},
    "clusters/problems.py": {"NOT_DRAINED", "NO_AGENTS", "NO_LIVE_NODE"},
    "sweeps/problems.py": {"GPU_WORKER_LOST", "PROCESS_LOST", "TUNE_ENDED"},
}  # fmt: skip
"""Problems that no test raises yet."""


def named_in_tests() -> set[str]:
    """The problems that tests name: as `problems.NAME` of a room, or by their code."""
    codes, named = {problem.code: name for name, problem in PROBLEMS.items()}, set()
    for file in Path(__file__).parents[1].rglob("*.py"):
        nodes, rooms, entries = [*ast.walk(ast.parse(file.read_text()))], {}, {}
        for node in nodes:
            for entry in node.names if isinstance(node, ast.ImportFrom) and node.module else ():
                path = f"{node.module.removeprefix('lockstep').lstrip('.').replace('.', '/')}/".lstrip("/")
                if entry.name == "problems":
                    rooms[entry.asname or entry.name] = f"{path}problems.py"
                else:
                    entries[entry.asname or entry.name] = f"{path.rstrip('/')}.py:{entry.name}"
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                named.add(f"{rooms.get(node.value.id)}:{node.attr}")
            elif isinstance(node, ast.Name):
                named.add(entries.get(node.id, ""))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(codes.get(node.value, ""))
    return named


@pytest.mark.scenario
def test_every_problem_is_raised_in_a_test() -> None:
    """A line that no test has seen may have a fact too few, or a remedy for something else."""
    unnamed: dict[str, set[str]] = {}
    for name in PROBLEMS.keys() - named_in_tests():
        file, _, entry = name.partition(":")
        unnamed.setdefault(file, set()).add(entry)
    assert unnamed == UNTESTED


def made(file: Path) -> Iterator[tuple[int, str, set[str]]]:
    """Where a file makes errors of problems: the line, the problem, and the names of the facts. Calls that pass a mapping on are left out."""
    nodes, tables, entries = [*ast.walk(ast.parse(file.read_text()))], {}, {}
    for node in nodes:
        for entry in node.names if isinstance(node, ast.ImportFrom) and node.module else ():
            path = node.module.removeprefix("lockstep.").replace(".", "/")
            tables[entry.asname or entry.name] = f"{path}/{entry.name}.py"
            entries[entry.asname or entry.name] = f"{path}.py:{entry.name}"
    for call in nodes:
        if not isinstance(call, ast.Call) or not all(keyword.arg for keyword in call.keywords):
            continue
        name = ""
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            name = f"{tables.get(call.func.value.id)}:{call.func.attr}"
        elif isinstance(call.func, ast.Name):
            name = entries.get(call.func.id, "")
        if name in PROBLEMS:
            yield call.lineno, name, {keyword.arg or "" for keyword in call.keywords}


@pytest.mark.scenario
def test_an_error_is_made_with_the_facts_that_its_line_has() -> None:
    """One too few is a KeyError in the place of the error, and one too many is told to programs alone."""
    files = [*PACKAGE.rglob("*.py")]
    calls = [(file, *call) for file in files for call in made(file)]
    assert len(calls) > len(PROBLEMS)
    assert [
        f"{file}:{line}: {name} got {sorted(facts)}, wanted {sorted(facts_of(PROBLEMS[name]))}"
        for file, line, name, facts in calls
        if facts != facts_of(PROBLEMS[name]).keys()
    ] == []


def test_the_page_has_a_table_for_every_kind_of_a_rooms_problems() -> None:
    page = (PACKAGE.parents[1] / "docs" / "failures.md").read_text()
    for name, problem in PROBLEMS.items():
        assert f"platform/lockstep/{name.partition(':')[0]} ({problem.section})" in page, name
        assert problem.row in page, name


def test_a_row_of_the_page_is_the_template_without_its_facts() -> None:
    problem = Problem("a.b", SpecError, "a: got {got!r} in {where}", "leave {got} out", cause="x", advice="y")
    assert problem.row == "| `a: got '…' in …; …` | x | y |"
    assert str(problem(got="it's", where="b")) == "a: got \"it's\" in b; leave it's out"


def test_nothing_looks_for_words_in_a_message_of_its_own() -> None:
    """What an error is, its code and its facts say. Texts of other libraries are another matter: no code comes with those."""
    searched = re.compile(
        r"\bin str\((?:error|failure)\)(?!\.splitlines)|str\(error\)\.(?:startswith|endswith|removeprefix|r?partition)\("
    )
    found = {
        f"{file.relative_to(PACKAGE)}: {line.strip()}"
        for file in PACKAGE.rglob("*.py")
        for line in file.read_text().splitlines()
        if searched.search(line)
    }
    assert {entry.partition(":")[0] for entry in found} == {
        "parsing.py",  # of a YAML parser
        "data/loader.py",  # of torch's DataLoader
        "clusters/submission.py",  # of Ray's job API
    }, found


class TwoArguments(JobError):
    """As a job may derive one."""

    def __init__(self, field: str, size: int) -> None:
        super().__init__(f"{field}: got {size}")
        self.size = size


def test_an_error_that_a_job_derives_arrives_as_what_it_is() -> None:
    """By its own class it could not be read: a worker that sends it would count as lost, and be replaced."""
    error = TwoArguments("length", 5)
    error.failed_at = FailedAt("job", 7, 1, (3, 4))
    for back in (pickle.loads(pickle.dumps(error)), error.with_message("length: got 5")):
        assert (type(back), str(back), back.failed_at) == (JobError, "length: got 5", error.failed_at)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_exit_code_is_2_for_a_wrong_spec_and_1_for_a_failed_run(kind: type[LockstepError]) -> None:
    assert kind.exit_code == (2 if issubclass(kind, SpecError) else 1)


def test_the_drawing_at_the_top_shows_every_error() -> None:
    drawing = (errors.__doc__ or "").partition("A message")[0]
    assert re.findall(r"\b\w+Error\b", drawing) == [kind.__name__ for kind in ERRORS]


def test_nearest_suggests_one_name_or_lists_them_all() -> None:
    assert nearest("worker", ["seed", "workers", "batch"]) == "; did you mean 'workers'?"
    assert nearest("zzz", ["seed", "batch"]) == "; known here: batch, seed"
    assert nearest("zzz", []) == ""


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "theirs"])
def test_a_place_is_in_the_jobs_code_wherever_libraries_lie(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages of the system lie below those of a virtual environment; a folder of any other name is the person's."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"helper_{folder[0]}.py").write_text("def fail():\n    raise ValueError\n")
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    with pytest.raises(ValueError) as raised:
        importlib.import_module(f"helper_{folder[0]}").fail()
    where = place_in_job(raised.value)
    assert (Path(__file__).name in where) == (folder != "theirs"), where
