"""The documentation holds: every field, option and error is on its page, links lead somewhere, snippets parse."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pydantic
import pytest
import torch
import typer
import yaml

from lockstep import errors
from lockstep.cli.main import app
from lockstep.communication.group import Group
from lockstep.driver.result import Result
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, Warned, tell_nobody
from lockstep.record.ledger.rows import StepRow
from lockstep.spec.fields import PLACEMENT, PLACEMENT_FIELDS, Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.schedulers import Asha, Median, Pbt
from lockstep.spec.sweep import KINDS, Budget, SweepSpec, load_sweep
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from tests import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    ROOT / "README.md",
    ROOT / "jobs" / "README.md",
    *sorted((ROOT / "cluster").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def each_page() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page that are in one of these languages."""
    return [text for language, text in FENCE.findall(page.read_text()) if language in languages]


def rows(page: Path) -> Iterator[list[str]]:
    """The cells of every row of every table."""
    for line in page.read_text().splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


# --- links and snippets -----------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page()
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@each_page()
def test_tables_are_whole(page: Path) -> None:
    """A row behind a blank line is shown as it is typed."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"[|\s:-]+", after), line


@each_page()
def test_snippets_parse(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)
    for text in blocks(page, "json"):
        json.loads(text)


@each_page()
def test_specs_that_are_shown_are_valid(page: Path) -> None:
    for text in blocks(page, "yaml"):
        document = yaml.safe_load(text)
        if "space" in document:
            load_sweep({**document, "spec": {"job": {"use": "jobs.digits.job:Digits"}}})
        else:
            load_spec(document)


@each_page()
def test_commands_that_are_shown_can_be_read(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `lockstep …` of a shell block has a command, options and overrides that exist."""
    monkeypatch.chdir(ROOT)
    for line in "\n".join(blocks(page, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if "lockstep" not in (Path(word).name for word in words):
            continue
        start = [Path(word).name for word in words].index("lockstep") + 1
        given = words[start : words.index(">")] if ">" in words else words[start:]
        name, *rest = given
        with typer.main.get_command(app).commands[name].make_context(name, rest) as context:  # type: ignore[attr-defined]
            if name == "train" and context.params["spec"].exists():
                load_spec(context.params["spec"], context.params["overrides"] or [])


# --- complete pages ---------------------------------------------------------------------------------------


class Field(NamedTuple):
    """One field of the spec: its dotted name and one of its defaults, as plain data."""

    name: str
    default: Any


def sections(annotation: Any) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections(inner)]


def fields(model: type[pydantic.BaseModel], prefix: str = "", filled: Any = None) -> Iterator[Field]:
    """Every field below `model`; `filled` is the section that a spec has where it says nothing."""
    for attribute, field in model.model_fields.items():
        name = prefix + (field.alias or attribute)
        default = getattr(filled, attribute, field.default) if isinstance(filled, model) else field.default
        below = sections(field.annotation)
        for section in below:
            yield from fields(section, f"{name}.", default)
        if not below or isinstance(default, int):  # one that has parts may be a plain number as well
            yield Field(name, list(default) if isinstance(default, tuple) else default)


def described() -> dict[str, list[list[str]]]:
    """The rows of docs/spec.md by the field that they describe."""
    found: dict[str, list[list[str]]] = {}
    for cells in rows(DOCS / "spec.md"):
        if len(cells) == 6 and re.fullmatch(r"`[\w.]+`", cells[0]):
            found.setdefault(cells[0].strip("`"), []).append(cells)
    return found


def test_every_field_of_the_spec_is_described_and_no_other() -> None:
    names = {field.name for field in fields(Spec)}
    assert {"batch.global", "optimizer.nesterov", "schedule.gamma", "early_stop.metric"} <= names
    sections = {"early_stop", "fork", "checkpoint.every", "checkpoint.keep_best", "sharding"}
    assert described().keys() - sections == names


def test_defaults_of_the_spec_are_those_described() -> None:
    """Where a default is told in words, the words are trusted."""
    expected: dict[str, list[Any]] = {}
    for field in fields(Spec):
        expected.setdefault(field.name, []).append(field.default)
    compared = 0
    for name, found in described().items():
        cells = [cells[2] for cells in found]
        if name in expected and all(re.fullmatch(r"`[^`]+`", cell) for cell in cells):
            told = [yaml.safe_load(cell.strip("`")) for cell in cells]
            assert all(default in told for default in expected[name]), name
            assert all(value in expected[name] for value in told), name
            compared += 1
    assert compared > 30


def test_identity_and_placement_are_those_described() -> None:
    for name, found in described().items():
        section, _, field = name.partition(".")
        placement = section in PLACEMENT or PLACEMENT_FIELDS.get(section) == field
        assert {cells[4] for cells in found} == {"placement" if placement else "identity"}, name


def test_every_command_and_option_is_described() -> None:
    page = (DOCS / "cli.md").read_text()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        section = page.partition(f"## `lockstep {name}")[2].partition("\n## ")[0]
        assert section, name
        for parameter in command.params:
            for option in (word for word in parameter.opts if word.startswith("-") and word != "--help"):
                assert f"`{option}`" in section, f"{name} {option}"


def test_every_field_of_a_result_is_described() -> None:
    told = {name for cells in rows(DOCS / "cli.md") for name in re.findall(r"`(\w+)`", cells[0])}
    assert {field.name for field in dataclasses.fields(Result)} <= told


def test_every_field_of_a_sweep_is_described() -> None:
    page = (DOCS / "sweeps.md").read_text()
    told = set(
        re.findall(r"`([\w.]+)`", "\n".join(line for line in page.splitlines() if line.startswith("|")))
    )
    fields = set(SweepSpec.model_fields) - {"budget"} | {f"budget.{name}" for name in Budget.model_fields}
    assert fields <= told
    for scheduler in (Asha, Median, Pbt):
        assert set(scheduler.model_fields) - {"name"} <= told
    assert all(f"`{{{kind}:" in page for kind in KINDS)


def test_every_error_is_described() -> None:
    page = (DOCS / "failures.md").read_text()
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.LockstepError):
            assert name in page
            assert kind is errors.LockstepError or f"## {name} · exit code {kind.exit_code}" in page, name


def test_every_failure_and_its_limits_are_shown_by_a_test() -> None:
    """The row of a failure names at least one test."""
    page = (DOCS / "failures.md").read_text()
    _, _, after = page.partition("## What fails, and what follows\n")
    table = [line for line in after.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
    assert len(table) > 30
    for line in table:
        assert re.search(r"\(\.\./tests/[\w/]+\.py\)", line), line


def only_exact(test_file: Path) -> bool:
    """Whether nothing of it runs before a change lands."""
    every = ast.parse(test_file.read_text()).body
    if any(re.match(r"pytestmark = .*mark\.exact\b", ast.unparse(line), re.DOTALL) for line in every):
        return True
    tests = [line for line in every if isinstance(line, ast.FunctionDef) and line.name.startswith("test_")]
    return bool(tests) and all(
        any(ast.unparse(mark) == "pytest.mark.exact" for mark in test.decorator_list) for test in tests
    )


@pytest.mark.parametrize("page", ["guarantees.md", "failures.md"])
def test_what_is_promised_is_tested_before_a_change_lands_or_says_that_it_is_not(page: str) -> None:
    """Each line that names tests names one of the default run or a scenario, or `make exact`."""
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith(("|", "- "))]
    named = {line: re.findall(r"\((\.\./tests/[\w/]+\.py)\)", line) for line in lines}
    assert any(named.values())
    for line, files in named.items():
        if files and "`make exact`" not in line:
            assert not all(only_exact((DOCS / file).resolve()) for file in files), line


def test_every_page_is_on_the_map() -> None:
    linked = {(DOCS / target).resolve() for target in LINK.findall((DOCS / "index.md").read_text())}
    assert linked >= {page.resolve() for page in DOCS.rglob("*.md") if page.name != "index.md"}


def test_what_is_made_of_the_code_is_as_the_code_says() -> None:
    """`make docs` writes it anew: the reference of jobs, tables in other pages."""
    made = dict(reference.pages())
    assert made.keys() >= {reference.PAGE, DOCS / "cli.md"}
    for page, text in made.items():
        assert page.read_text() == text, page
    assert all(
        f"### `{name}`" in reference.PAGE.read_text() for name in ("__init__", "after_step", "state_dict")
    )


# --- the example ------------------------------------------------------------------------------------------


@pytest.mark.scenario
def test_the_job_that_is_shown_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "writing-a-job.md"
    package = tmp_path / "job_of_the_docs"
    package.mkdir()
    (package / "job.py").write_text(blocks(page, "python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    document = yaml.safe_load(blocks(page, "yaml")[0])
    document["job"]["use"] = document["job"]["use"].replace("jobs.spirals", package.name)
    spec = load_spec(document, ["length.epochs=10"])
    job = load_job(spec.job.use, spec.job.params)
    summary = fit(spec, job, Group.join(torch.device("cpu")), tell_nobody, NoRequests())
    assert summary is not None
    assert summary["metrics"].keys() >= {"train/accuracy", "eval/accuracy", "eval/accuracy_inside"}
    assert summary["metrics"]["eval/accuracy"] > 0.8


SHOWN = {
    "A loss over the whole batch": "tests.unit.job.shown_jobs:Towers",
    "Terms with weights of their own": "tests.unit.job.shown_jobs:Boxes",
    "Statistics of a step": "tests.unit.job.shown_jobs:Queued",
    "Optimizers that evaluate the loss again": "tests.unit.job.shown_jobs:Labelled",
    "A scheduler that counts epochs": "tests.unit.job.shown_jobs:Labelled",
}
"""The job that each section of writing-a-job.md, or text in it, goes on, which lacks what it shows."""


@pytest.mark.scenario
@pytest.mark.thinned(5)
@pytest.mark.parametrize("section", SHOWN)
def test_what_a_section_shows_trains(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "writing-a-job.md").read_text()
    text = page[page.index(f"\n## {section}\n" if f"## {section}\n" in page else f"\n{section}") :]
    methods = textwrap.indent(FENCE.findall(text)[0][1], "    ")
    module, base = SHOWN[section].split(":")
    source = f"from {module} import *\n\n\nclass Shown({base}):\n{methods}"
    name = f"shown_{base.lower()}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    run = {
        "job": {"use": f"{name}:Shown"},
        "batch": {"global": 8, "micro": 2},
        "optimizer": {"name": "adamw", "lr": 0.05},
        "length": {"epochs": 12},
    }
    spec, told, losses = load_spec(run), list[str](), list[float]()

    def tell(event: Event) -> None:
        if isinstance(event, Warned):
            told.append(event.text)
        if isinstance(event, StepRow):
            losses.append(event.loss)

    job = load_job(spec.job.use, spec.job.params)
    assert fit(spec, job, Group.join(torch.device("cpu")), tell, NoRequests()) is not None
    assert told == [] and losses[-1] < 0.95 * losses[0]
