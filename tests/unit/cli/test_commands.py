"""How commands are declared: one table of options for the command line and for Python, groups, examples, one line each."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lockstep.calls import named_runs, resume, train
from lockstep.cli.commands import GROUPS
from lockstep.cli.main import app
from lockstep.driver.options import CallOptions, RunOptions, SweepCallOptions, options_of_call, taken_by
from lockstep.spec.loading import load_spec
from tests.in_process import here
from tests.unit.driver import called_apart

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def groups_of(help_text: str) -> Iterator[tuple[str, list[str]]]:
    """Each section of a help page, and its lines."""
    for part in help_text.split("\n\n"):
        title, *lines = part.strip("\n").splitlines()
        if title.endswith(":"):
            yield title.removesuffix(":"), lines


def test_every_command_is_in_one_group_with_one_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = here(monkeypatch, capfd, tmp_path, "--help")
    sections = dict(groups_of(out))
    assert code == 0
    assert list(sections)[-len(GROUPS) :] == list(GROUPS.values())
    listed = [line.split() for title in GROUPS.values() for line in sections[title]]
    assert sorted(words[0] for words in listed) == sorted(COMMANDS)
    assert all(len(words) > 2 and "..." not in words[-1] for words in listed)


@pytest.mark.parametrize("name", ["record", "cluster"])
def test_commands_of_a_command_have_one_whole_line_each(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = here(monkeypatch, capfd, tmp_path, name, "--help")
    listed = [line.split() for line in dict(groups_of(out))["Commands"]]
    assert code == 0
    assert [words[0] for words in listed] == list(COMMANDS[name].commands)
    assert all(len(words) > 2 and "..." not in words[-1] for words in listed)


def leaves(commands: dict[str, Any], *before: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    for name, command in commands.items():
        words = (*before, name)
        inner = getattr(command, "commands", None)
        yield from [(" ".join(words), command)] if inner is None else leaves(inner, *words)


LEAVES = dict(leaves(COMMANDS))


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_shows_examples_that_can_be_read(name: str) -> None:
    examples = LEAVES[name].epilog.splitlines()[2:]
    assert examples
    for example in examples:
        words = shlex.split(example)
        words = words[words.index("lockstep") + 1 :]
        own = len(name.split())
        assert words[:own] == name.split()
        words = words[own : words.index(">")] if ">" in words else words[own:]
        with LEAVES[name].make_context(name, words):
            pass


# --- one value of options ---------------------------------------------------------------------------------


def test_what_python_takes_are_fields_of_the_options() -> None:
    fields = {field.name for field in dataclasses.fields(RunOptions)}
    assert CallOptions.__annotations__.keys() <= fields
    assert {name: taken_by(name) for name in COMMANDS if taken_by(name)} == {
        "train": ("local", "address", "chaos", "retries", "notify", "webhook"),
        "resume": ("local", "address", "chaos", "retries", "notify", "webhook"),
        "sweep": ("address", "notify", "webhook"),
        "verify": ("local", "address"),
        "promote": ("local", "address"),
    }
    for name in COMMANDS:
        taken = {parameter.name for parameter in COMMANDS[name].params}
        assert set(taken_by(name)) <= taken, name
    with pytest.raises(TypeError, match=r"there is no option 'adress'; there are .*address"):
        options_of_call(adress="auto")  # type: ignore[call-arg]
    assert options_of_call(local=True).local
    with pytest.raises(TypeError, match="there is no option 'local'"):
        options_of_call(None, SweepCallOptions, local=True)


GIVEN = {"address": "10.0.0.1:6379", "chaos": "worker:0.5", "notify": "true"}


@pytest.mark.parametrize("name", ["train", "resume"])
def test_the_command_line_and_python_come_to_the_same_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only what they show differs."""
    taken: list[Any] = []

    def called(options: RunOptions, *given: Any, **named: Any) -> Any:
        named.pop("on_run_id", None)
        taken.append((options, given, named))
        return called_apart.result("FINISHED", 3)

    monkeypatch.setattr(named_runs, "train_named", called)
    monkeypatch.setattr(train, "train_named", called)
    monkeypatch.setattr(resume, "resume_with", called)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    spec = tmp_path / "spec.yaml"
    spec.write_text("job: {use: 'jobs.digits.job:Digits'}\n")
    words = [word for option, value in GIVEN.items() for word in (f"--{option}", value)]
    what = str(spec) if name == "train" else "a" * 32
    more = ["--run", "night"] if name == "train" else ["--from-step", "7"]
    code, out, err = here(monkeypatch, capfd, tmp_path, name, what, *words, *more, "--uri", "off", "--json")
    assert (code, json.loads(out)["status"]) == (0, "FINISHED"), err
    monkeypatch.chdir(tmp_path)
    if name == "train":
        train.train(spec, uri="off", run="night", **GIVEN)  # type: ignore[arg-type]
    else:
        resume.resume(what, uri="off", step=7, **GIVEN)  # type: ignore[arg-type]
    (of_command, given, named), (of_python, given_here, named_here) = taken
    assert {field: getattr(of_command, field) for field in GIVEN} == GIVEN
    same = {"progress": of_python.progress, "began_at": of_python.began_at}
    assert dataclasses.replace(of_command, **same) == of_python
    if name == "train":  # by position there, by name here
        loaded = load_spec(spec, uri="off")
        assert (given, named) == ((loaded, "night"), {"takeover": False})
        assert (given_here, named_here) == ((), {"spec": loaded, "name": "night", "takeover": False})
    else:
        assert (given, named) == (given_here, named_here)


def test_what_comes_from_the_environment_is_taken_where_the_command_line_has_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    taken: list[RunOptions] = []

    def called(options: RunOptions, *given: Any, **named: Any) -> Any:
        taken.append(options)
        return called_apart.result("FINISHED", 3)

    monkeypatch.setattr(named_runs, "train_named", called)
    monkeypatch.setenv("LOCKSTEP_NOTIFY", "echo environment")
    (tmp_path / "spec.yaml").write_text("job: {use: 'jobs.digits.job:Digits'}\n")
    for more in ([], ["--notify", "echo line"]):
        assert here(monkeypatch, capfd, tmp_path, "train", "spec.yaml", "--uri", "off", *more)[0] == 0
    assert [options.notify for options in taken] == ["echo environment", "echo line"]
    assert not taken[0].local
    assert taken[0].retries == 0


def test_a_file_that_is_not_there_has_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.yaml").write_text("job: {use: 'a:B'}\n")
    for name, told in (
        ("trian.yaml", "did you mean 'train.yaml'?"),
        ("x/y.yaml", "have `lockstep init NAME` write one"),
    ):
        code, _, err = here(monkeypatch, capfd, tmp_path, "train", name)
        assert code == 2
        assert told in err
