"""What a command can be refused for by its words alone is told as the problem that it is, before anything is opened or trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import problems
from lockstep.errors import Problem
from tests.in_process import here

RUN = "f" * 32

CALLS: list[tuple[list[str], Problem[Any]]] = [
    (["runs", "--uri", "off", "--limit", "0"], problems.LIMIT),
    (["runs", "--uri", "off", "--limit", "1001"], problems.LIMIT),
    (["runs", "--uri", "off", "--storage", "nope"], problems.NO_STORAGE),
    (["show", RUN, "train/loss", "--uri", "off"], problems.SHOW_KEYS),
    (["compare", RUN, RUN, "--uri", "off"], problems.COMPARED_RUNS),
    (["verify"], problems.NOTHING_TO_VERIFY),
    (["verify", RUN, "--key", "public.pem"], problems.NOTHING_TO_VERIFY),
    *(
        (["verify", "--statement", "run.json", "--key", "public.pem", *words], problems.STATEMENT_SHARE)
        for words in (["--all"], ["--from", "3"], ["--steps", "2"])
    ),
    (["guard", "spec.yaml"], problems.GUARD_BASE),
    (["train", "spec.yaml", "--local", "--retries", "2"], problems.RETRIES_NAME),
    (["resume", RUN, "--retries", "2", "--fork"], problems.RETRIES_FORK),
    (["resume", RUN, "--retries", "2", "--without", "3"], problems.RETRIES_FORK),
    (["resume", RUN, "--without", "3", "--takeover"], problems.WITHOUT_CHECKPOINT),
    (["resume", RUN, "--without", "3", "--from-step", "2"], problems.WITHOUT_CHECKPOINT),
    (["submit"], problems.SPEC_OR_JOB),
    (["submit", "spec.yaml", "--attach", "job"], problems.SPEC_OR_JOB),
    (["bench", "spec.yaml", "--workers", "1,x"], problems.WORKER_COUNTS),
]


@pytest.mark.parametrize(
    ("words", "problem"), CALLS, ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else ""
)
def test_words_that_do_not_go_together_are_refused_by_name(
    words: list[str],
    problem: Problem[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "spec.yaml").write_text(
        "job: {use: 'tests.distributed.small_jobs:Plain'}\nrecord: {uri: off}\n"
    )
    code, out, err = here(monkeypatch, capfd, tmp_path, *words, "--json")
    told = json.loads(out)
    assert (told["code"], code) == (problem.code, problem.error.exit_code), err
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


@pytest.mark.parametrize("words", [["--cloud", "aws"], ["--metadata", "http://127.0.0.1:1"]])
def test_a_cloud_and_its_address_belong_together(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The agent of a node has no object to answer with."""
    code, _, err = here(monkeypatch, capfd, tmp_path, "cluster", "notices", *words)
    assert (code, err) == (2, f"lockstep: {problems.NOTICES()}\n")
