"""Whether a change of the code changes bits: what `lockstep guard` does, for Python."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lockstep.calls import problems
from lockstep.checks.processes import interruptible
from lockstep.driver.options import RunOptions
from lockstep.proof.bisection import first_changed
from lockstep.proof.errors import UnfitError
from lockstep.proof.guard import (
    Guarded,
    Start,
    Trained,
    Trainer,
    compare,
    look_into,
    start_python,
)
from lockstep.proof.repository import Repository
from lockstep.proof.step_spans import STEPS

NOT_COMMITTED = ""
"""Stands for the working tree among commits."""


def guard(
    spec: str | Path,
    base: str,
    overrides: Sequence[str] = (),
    *,
    steps: int = STEPS,
    bisect: str | None = None,
    workers: int = 1,
    options: RunOptions | None = None,
    start: Start = start_python,
) -> Guarded:
    """Whether the working tree around the working directory trains the first `steps` steps of `spec` as the commit `base` does.

    Each is trained from its own files, by `workers` processes of its own; nothing is recorded, and no network is used. With
    `bisect`, a commit that trains as `base` does, the first one after it that changes bits is looked for. SpecError where there is
    no such commit, spec or working tree, and where one of the two cannot be trained.
    """
    options = options or RunOptions(local=True)
    working_directory = Path.cwd().resolve()
    repository = Repository.around(working_directory)
    commit, good = repository.commit(base), None if bisect is None else repository.commit(bisect)
    line = [] if good is None else repository.since(good)
    train = Trainer(
        repository.root,
        _spec_path(Path(spec), working_directory, repository.root),
        overrides,
        steps,
        workers,
        working_directory.relative_to(repository.root),
        _paths(repository.root),
        start,
    )
    with interruptible():
        options.progress.say(f"{steps} steps are trained from the working tree and from commit {commit[:12]}")
        tree_result = train(repository.root, "the working tree")
        base_result = _trained(repository, train, commit)
        answer = Guarded(base=commit, steps=max(tree_result.steps))
        answer.fields, answer.first_difference = compare(base_result, tree_result)
        if answer.first_difference is None:
            return answer
        with ExitStack() as stack:
            sides = {"found": repository.root, "base": stack.enter_context(repository.checked_out(commit))}
            look_into(answer.first_difference, lambda side, at: train(sides[side], side, at).look)
        if good is not None:
            _bisect(repository, train, base_result, good, line, answer, options)
        return answer


def _trained(repository: Repository, train: Trainer, commit: str) -> Trained:
    with repository.checked_out(commit) as tree:
        return train(tree, f"commit {commit[:12]}")


def _bisect(
    repository: Repository,
    train: Trainer,
    base_run: Trained,
    good: str,
    line: list[str],
    answer: Guarded,
    options: RunOptions,
) -> None:
    """Name the first commit that changes bits; the working tree does."""

    def same(commit: str) -> bool | None:
        options.progress.say(f"commit {commit[:12]} is trained: {repository.title(commit)}")
        try:
            return compare(base_run, _trained(repository, train, commit))[1] is None
        except UnfitError as error:
            options.progress.say(f"warning: {error}; it is passed over")
            return None

    if good != answer.base and not same(good):
        raise problems.GUARD_OTHER_BASE(good=good[:12], base=answer.base[:12])
    change = first_changed([*line, NOT_COMMITTED], same)
    passed_over = (
        f"commits right before it that cannot be trained, and may be the cause: {len(change.untold)}"
    )
    if change.commit == NOT_COMMITTED:
        answer.note = "no commit has the change: it is in the working tree alone"
    else:
        answer.commit, answer.title = change.commit, repository.title(change.commit)
    if change.untold:
        answer.note = "; ".join(filter(None, [answer.note, passed_over]))


def _spec_path(spec: Path, working_directory: Path, root: Path) -> str:
    """The spec as each tree finds its own: relative to the working directory. One outside the repository is the same for all."""
    if not spec.is_file():
        raise problems.GUARD_NO_FILE(got=spec)
    resolved = spec.resolve()
    if not resolved.is_relative_to(root):
        return str(resolved)
    if not resolved.is_relative_to(working_directory):
        raise problems.GUARD_OUTSIDE(got=spec)
    return str(resolved.relative_to(working_directory))


def _paths(root: Path) -> list[Path]:
    """Where Python searches within the repository: what is installed from it, and what PYTHONPATH names."""
    prefix = Path(sys.prefix).resolve()  # an environment within the repository is the same for all
    search_paths = dict.fromkeys(Path(path).resolve() for path in sys.path if path)
    return [
        path.relative_to(root)
        for path in search_paths
        if path.is_relative_to(root) and not path.is_relative_to(prefix)
    ]
