"""A change of the code is held against a commit: the same bits, or the first that differ and the commit that changed them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from lockstep.calls import problems as calls_problems
from lockstep.calls.guarding import guard
from lockstep.checks.processes import Process
from lockstep.cli.proofs import guarded_as_text
from lockstep.proof import guard_worker
from lockstep.proof import problems as proof_problems
from lockstep.proof.guard import Guarded
from lockstep.proof.repository import Repository
from tests.forked import Forked
from tests.in_process import here
from tests.raised import raises

JOB = """
import torch
from torch import nn
import torch.nn.functional as F
import lockstep
from small.parts import total

class Own(lockstep.Job):
    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def train_data(self):
        x = torch.randn(24, 8)
        return torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))

    def loss(self, model, batch):
        x, y = batch
        h = model(x)
        return lockstep.Loss(F.cross_entropy(h * total(h).cos(), y, reduction="sum"), len(y))
"""
TOTAL = "def total(h):\n    return h.sum(1, keepdim=True)\n"
OTHER = TOTAL.replace("h.sum", "h.flip(1).sum")
SPEC = {
    "job": {"use": "small.job:Own"},
    "length": {"steps": 6},
    "batch": {"global": 8, "micro": 2},
    "schedule": {"name": "cosine"},
    "rehearsal": "off",
}


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=T", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false")
    told = subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


def commit(folder: Path, title: str) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", title)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with a job, in which commands are given."""
    folder = tmp_path / "repository"
    (folder / "small").mkdir(parents=True)
    git(tmp_path, "init", "--quiet", "repository")
    (folder / "small" / "job.py").write_text(JOB)
    (folder / "small" / "parts.py").write_text(TOTAL)
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    commit(folder, "the job")
    monkeypatch.chdir(folder)
    return folder


def forked(request: str, folder: Path, environment: Mapping[str, str]) -> Process:
    """A side in a process that has the slow imports behind it."""
    return Forked(side_of, request, cwd=folder, env=environment)


def side_of(request: str) -> None:
    raise SystemExit(guard_worker.main(request))


def guarded(base: str = "HEAD", **options: object) -> Guarded:
    return guard("spec.yaml", base, steps=3, start=forked, **options)  # type: ignore[arg-type]


def left(folder: Path) -> tuple[str, list[str]]:
    """What could be left in a repository: working trees, and files that git does not know."""
    return git(folder, "worktree", "list"), git(folder, "status", "--porcelain", "--ignored").splitlines()


@pytest.mark.scenario
def test_a_refactoring_has_the_same_bits_and_leaves_nothing(repository: Path) -> None:
    (repository / "small" / "parts.py").write_text(
        "def total(values):\n    return values.sum(dim=1, keepdim=True)\n"
    )
    before = left(repository)
    found = guarded()
    assert found.same
    assert found.steps == 3
    assert [one.field for one in found.fields] == ["job.source"]
    assert left(repository) == before


@pytest.mark.scenario
def test_another_order_of_a_sum_is_named_by_its_operator(repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD")
    (repository / "small" / "parts.py").write_text(OTHER)
    found = guarded()
    first = found.first_difference
    assert first is not None
    assert first.step == 1
    assert first.micro_batch is not None
    assert first.operator == "aten.sum.dim_IntList → aten.flip"
    text = guarded_as_text(found)
    assert f"compared          commit {base[:12]} → the working tree" in text
    assert len(left(repository)[0].splitlines()) == 1


def thirty_commits(repository: Path, changed: int, broken: int | None = None) -> list[str]:
    """Commits that each add a line of no consequence; number `changed` changes bits, number `broken` cannot be trained."""
    parts = repository / "small" / "parts.py"
    made = []
    for i in range(30):
        text = (OTHER if i >= changed else TOTAL) + f"# line {i}\n" + ("(\n" if i == broken else "")
        parts.write_text(text)
        made.append(commit(repository, f"change {i}"))
    return made


@pytest.mark.scenario
def test_a_commit_that_imports_from_the_working_tree_is_no_comparison(repository: Path) -> None:
    """By an absolute path, as an editable installation has it: both sides would train the change, and be the same. The control has the same file."""
    library = repository / "lib" / "shared_total.py"
    library.parent.mkdir()
    library.write_text(TOTAL)
    job = repository / "small" / "job.py"
    imported = f"import sys\nsys.path.append({str(library.parent)!r})\nfrom shared_total import total\n"
    job.write_text(JOB.replace("from small.parts import total\n", imported))
    commit(repository, "the sum is elsewhere")
    assert guarded().same
    library.write_text(OTHER)
    with raises(proof_problems.UNFIT, got=re.compile("shared_total")):
        guarded()


@pytest.mark.scenario
def test_the_commit_that_changed_bits_is_found_among_thirty(repository: Path) -> None:
    good = git(repository, "rev-parse", "HEAD")
    commits = thirty_commits(repository, changed=19, broken=22)
    found = guarded(good, bisect=good)
    assert (found.commit, found.title, found.note) == (commits[19], "change 19", None)
    assert len(left(repository)[0].splitlines()) == 1


def test_commits_that_have_not_the_good_one_are_not_asked(repository: Path) -> None:
    """They came in by a merge: with the bits of before it, each of them would be taken for one that changes bits."""
    git(repository, "switch", "--quiet", "--create", "side")
    (repository / "small" / "parts.py").write_text(OTHER)
    good = commit(repository, "other bits, on purpose")
    git(repository, "switch", "--quiet", "-")
    for i in range(3):
        (repository / f"{i}.txt").write_text("")
        commit(repository, f"change {i}")
    git(repository, "merge", "--quiet", "--no-edit", "side")
    merged = git(repository, "rev-parse", "HEAD")
    (repository / "small" / "parts.py").write_text(TOTAL)
    last = commit(repository, "the bits of before")
    found = Repository.around(repository)
    assert found.since(good) == [merged, last]
    assert found.since(f"{merged}^") == [merged, last]
    assert found.since(merged) == [last]


@pytest.mark.scenario
def test_a_change_that_no_commit_has_is_told_as_such(repository: Path) -> None:
    good = git(repository, "rev-parse", "HEAD")
    (repository / "small" / "parts.py").write_text(OTHER)
    found = guarded(good, bisect=good)
    assert (found.commit, found.note) == (None, "no commit has the change: it is in the working tree alone")


def test_a_signal_leaves_nothing(repository: Path) -> None:
    """SIGTERM as the base is about to be trained."""
    before, handler = left(repository), signal.getsignal(signal.SIGTERM)

    def killed(request: str, folder: Path, environment: Mapping[str, str]) -> Process:
        if folder != repository:
            os.kill(os.getpid(), signal.SIGTERM)
        return forked(request, folder, environment)

    with pytest.raises(KeyboardInterrupt):
        guard("spec.yaml", "HEAD", steps=1, start=killed)
    assert left(repository) == before
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.exact
@pytest.mark.parametrize("changed", [0, 7, 29])
def test_the_command_finds_the_commit_with_new_interpreters(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], changed: int
) -> None:
    """On two workers, as a person gives it."""
    commits = thirty_commits(repository, changed)
    words = ("guard", "spec.yaml", "--bisect", "HEAD~30", "--steps", "2", "--workers", "2", "--json")
    code, out, _ = here(monkeypatch, capfd, repository, *words)
    answer = json.loads(out)
    assert (code, answer["same"], answer["commit"]) == (1, False, commits[changed])


def test_what_cannot_be_compared_is_told_in_one_line(repository: Path, tmp_path: Path) -> None:
    with raises(proof_problems.NO_COMMIT, got="nowhere"):
        guarded("nowhere")
    with raises(calls_problems.GUARD_NO_FILE, got="other.yaml"):
        guard("other.yaml", "HEAD", start=forked)
    outside = git(repository, "commit-tree", "HEAD^{tree}", "-m", "alone")
    with raises(proof_problems.NOT_BEFORE, got=outside[:12]):
        guarded(bisect=outside)
    (repository / "other.yaml").write_text(yaml.safe_dump(SPEC))
    with raises(proof_problems.UNFIT_FILE, what=re.compile("^commit [0-9a-f]{12}$"), file="other.yaml"):
        guard("other.yaml", "HEAD", steps=1, start=forked)
    (repository / "small" / "job.py").write_text("(")
    with raises(proof_problems.UNFIT, what="the working tree", got=re.compile("small.job")) as told:
        guarded()
    assert told.value.exit_code == 2
    assert len(left(repository)[0].splitlines()) == 1


def test_outside_of_a_repository_nothing_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(proof_problems.NO_REPOSITORY, got=re.compile(r"^not a git repository ")):
        guard("spec.yaml", "HEAD")


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_a_repository_that_git_refuses_is_told_in_the_words_of_git(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a container mounts one of another user."""
    monkeypatch.delenv("SUDO_UID", raising=False)
    os.chown(repository, 12345, 12345)
    os.chown(repository / ".git", 12345, 12345)
    with raises(
        proof_problems.NO_REPOSITORY, got=re.compile(r"^detected dubious ownership in repository at ")
    ):
        guarded()
