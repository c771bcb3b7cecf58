"""A git repository: its commits, and each of them checked out in a folder of its own for a while. Nothing is fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.proof import problems

_ENVIRONMENT = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",  # of a partial clone
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
_QUIET = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")


@dataclass(frozen=True, slots=True)
class Repository:
    """The repository whose working tree is `root`."""

    root: Path

    @classmethod
    def around(cls, folder: Path) -> Repository:
        """The repository of a folder. SpecError where it is in none."""
        if shutil.which("git") is None:
            raise problems.NO_GIT()
        result = _git(folder, "rev-parse", "--show-toplevel")
        if result.returncode:
            reason = next(iter(result.stderr.splitlines()), "").removeprefix("fatal: ")
            raise problems.NO_REPOSITORY(folder=folder, got=reason)
        return cls(Path(result.stdout.rstrip("\n")).resolve())

    def commit(self, revision: str) -> str:
        """The full name of a commit. SpecError where there is none of this name."""
        result = _git(
            self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
        )
        if result.returncode:
            shallow = self._output("rev-parse", "--is-shallow-repository") == "true"
            advice = "this clone is shallow: git fetch --unshallow brings the older ones" if shallow else ""
            raise problems.NO_COMMIT(got=revision, advice=advice)
        return result.stdout.strip()

    def since(self, good: str) -> list[str]:
        """The commits after `good` up to the checked-out one, oldest first, along first parents. SpecError where `good` is not an ancestor of it.

        Commits that came by a merge and do not descend from `good` are left out: they may have the bits from before it.
        """
        if _git(self.root, "merge-base", "--is-ancestor", good, "HEAD").returncode:
            raise problems.NOT_BEFORE(got=good[:12])
        line = self._output("rev-list", "--reverse", "--first-parent", f"{good}..HEAD").split()
        descendants = {*self._output("rev-list", "--ancestry-path", f"{good}..HEAD").split()}
        return [commit for commit in line if commit in descendants]

    def title(self, commit: str) -> str:
        """The first line of a commit's message."""
        return self._output("show", "--no-patch", "--format=%s", commit)

    @contextmanager
    def checked_out(self, commit: str) -> Iterator[Path]:
        """A commit's files in a temporary folder, which is removed on the way out."""
        with tempfile.TemporaryDirectory(prefix="lockstep-guard-") as folder:
            tree = Path(folder).resolve() / "tree"
            try:
                self._output("worktree", "add", "--quiet", "--force", "--detach", str(tree), commit)
                yield tree
            finally:
                # Also where it was made in part; what git does not remove goes with the folder.
                _git(self.root, "worktree", "remove", "--force", "--force", str(tree))

    def _output(self, *words: str) -> str:
        result = _git(self.root, *words)
        if result.returncode:
            raise problems.GIT_FAILED(command=words[0], got=" ".join(result.stderr.split()))
        return result.stdout.strip()


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # A variable such as GIT_DIR, which a hook is given, would lead every command to that repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "-C", str(folder), *_QUIET, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**environment, **_ENVIRONMENT},
    )
