"""The facts of what a job takes from outside itself: how they are named, compared between two executions of a run, and told where they have changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.job.identity import Difference, shown
from lockstep.job.inputs.external_reads import ABSENT, content_of, names_of
from lockstep.job.inputs.imports import below, roots_of
from lockstep.spec.fields import Spec

MOVED = "moved"
"""The fact of the environment that has those that are compared."""

FILE = "file."
"""How the field or fact of a file begins; its path follows, from the job's folder where it lies below."""

FOLDER = "folder."
"""How the fact of a folder begins that the job lists; its path follows."""

COPIED = "environment."
"""How the fact of a variable begins where the job copies the whole environment; its name follows."""

UNKNOWN = "unknown"
"""The fact of the environment that has what the job takes and nothing can be compared of."""

UNREPEATABLE = "unrepeatable"
"""The fact of the environment that has the functions by which the job gets another value each time, such as a clock."""

REPLACED = "replaced "
"""How the fact of a function begins that is not its library's own."""

STARTUP = "startup line of "
"""How the fact of a file begins from which Python runs lines as it starts."""

_BOTH_SIDES = (REPLACED, STARTUP, COPIED)
"""Facts that differ too where only one side has them."""

MOST_TOLD = 3
"""So many changed files are told by name."""


class Files:
    """How files are called, and which of them are inputs of their own."""

    def __init__(self, spec: Spec, source: Container[str] = ()) -> None:
        self._roots = roots_of(spec.job.use)
        self._source = source
        folders = (spec.checkpoint.storage, spec.record.folder, spec.record.uri)
        self._record_folders = frozenset(
            os.path.abspath(folder.removeprefix("sqlite:///"))  # noqa: PTH100 - not to follow links
            for folder in folders
            if folder and not folder.startswith(("s3:", "http"))
        )

    def name(self, path: str, *, always: bool = False) -> str:
        """The name of a file's field or fact; `always` without its folder where it lies elsewhere."""
        return f"{FILE}{below(Path(path), self._roots) or (Path(path).name if always else path)}"

    def own_name(self, path: str) -> str | None:
        """The name of the field of a file that decides. None for one that lies elsewhere, or is hidden, or has another field already."""
        inside = below(Path(path), self._roots)
        if (
            inside is None
            or any(part.startswith(".") for part in Path(inside).parts)
            or self.is_source(path)
            or self._is_record(path)
        ):
            return None
        return f"{FILE}{inside}"

    def path(self, name: str) -> str:
        """Where the file with this name is here."""
        return path_here(name.removeprefix(FILE), self._roots)

    def is_source(self, path: str) -> bool:
        """Whether it is source of the job, which has fields of its own."""
        return os.path.realpath(path) in self._source

    def listings(self, folders: Sequence[str]) -> dict[str, Any]:
        """The facts of folders that were listed, but for those of records and checkpoints."""
        return {
            f"{FOLDER}{below(Path(path), self._roots) or path}": names_of(path, self._record_folders)
            for path in folders
            if not self._is_record(path)
        }

    def _is_record(self, path: str) -> bool:
        return any(path == folder or path.startswith(folder + os.sep) for folder in self._record_folders)


def path_here(inside: str, roots: Sequence[Path]) -> str:
    """The path of what is called so: below the first of the roots that has it, else below the first."""
    if Path(inside).is_absolute() or not roots:
        return inside
    return next((str(root / inside) for root in roots if (root / inside).exists()), str(roots[0] / inside))


# --- compared and told ------------------------------------------------------------------------------------------


def contents_here(names: Sequence[str], spec: Spec) -> dict[str, Any]:
    """What files with these names hold here."""
    roots = roots_of(spec.job.use)
    return {name: content_of(path_here(name.removeprefix(FILE), roots))[0] for name in names}


def continued_files(
    fields: Mapping[str, Any],
    facts: Mapping[str, Any],
    saved_fields: Mapping[str, Any],
    saved_facts: Mapping[str, Any],
    spec: Spec,
    tell: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields and facts of an attempt that goes on with a run that had these saved ones. Tells what has changed.

    A field of a file that both have is left to the comparison of identities, which refuses. One that only the run had is kept as it was: here the file is
    not read, as where a cache stands for it or data were moved. One that only this attempt has is new, unless the run has made the file itself or it was
    moved: then it is a fact here too.
    """
    gone = {name: tree for name, tree in saved_fields.items() if name.startswith(FILE) and name not in fields}
    new = {name: tree for name, tree in fields.items() if name.startswith(FILE) and name not in saved_fields}
    saved, now = {**saved_facts, **gone}, {**facts, **new}
    moved = dict(_moved(saved, now))
    roots = roots_of(spec.job.use)
    lost = [
        Difference(name, tree, ABSENT)
        for name, tree in gone.items()
        if name not in moved
        and tree is not ABSENT
        and not Path(path_here(name.removeprefix(FILE), roots)).exists()
    ]
    warn_of_changes([*changed_facts(saved, now, spec), *lost], tell)
    known = {name: tree for name, tree in new.items() if name in saved_facts or name in moved.values()}
    for name in sorted(new.keys() - known.keys()):
        tell(
            f"resume: {name} is read here and was not in the run; if the job computes with it, take it away, or begin a new run"
        )
    return {**{name: tree for name, tree in fields.items() if name not in known}, **gone}, {**facts, **known}


def changed_facts(
    saved: Mapping[str, Any], now: Mapping[str, Any], spec: Spec | None = None
) -> list[Difference]:
    """What has changed between two environments' facts. With a `spec`, files and folders that only `saved` has are looked for here."""
    now = dict(now)
    if spec is not None:
        now |= _looked_for([name for name in saved if name not in now], spec)
    copies = all(any(name.startswith(COPIED) for name in side) for side in (saved, now))
    names = {*saved.keys() & now.keys()}
    names |= {
        name
        for name in saved.keys() ^ now.keys()
        if name.startswith(_BOTH_SIDES) and (copies or not name.startswith(COPIED))
    }
    changed = [
        Difference(name, saved.get(name), now.get(name))
        for name in sorted(names)
        if saved.get(name) != now.get(name)
    ]
    changed += [
        Difference(f"{new} ({old})", saved[old], now[new])
        for old, new in _moved(saved, now)
        if saved[old] != now[new]
    ]
    return changed


def _looked_for(names: Sequence[str], spec: Spec) -> dict[str, Any]:
    """The facts of files and folders with these names, as far as they are here."""
    roots, files = roots_of(spec.job.use), Files(spec)
    facts = dict[str, Any]()
    for name in names:
        if (
            name.startswith(FILE)
            and (content := content_of(path_here(name.removeprefix(FILE), roots))[0]) is not ABSENT
        ):
            facts[name] = content
        elif name.startswith(FOLDER) and os.path.isdir(path := path_here(name.removeprefix(FOLDER), roots)):  # noqa: PTH112
            facts.update(dict.fromkeys([name], *files.listings([path]).values()))
    return facts


def _moved(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Files that are now read from another folder, by their old and their new name: the last part of the path is the same, and on each side only one has it."""
    saved_names, new_names = _by_last_part(saved, now), _by_last_part(now, saved)
    for last, names in saved_names.items():
        candidates = new_names.get(last, [])
        if len(names) == len(candidates) == 1:
            yield names[0], candidates[0]


def _by_last_part(facts: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of the files that only `facts` has, by the last part of their path."""
    names_by_last_part = dict[str, list[str]]()
    for name in facts:
        if name.startswith(FILE) and name not in others:
            names_by_last_part.setdefault(Path(name.removeprefix(FILE)).name, []).append(name)
    return names_by_last_part


def warn_of_changes(changes: Sequence[Difference], tell: Callable[[str], None]) -> None:
    """Warn of facts that have changed since the run was saved: one warning each, but of many files only the first, and one for all copied variables."""
    files = [change for change in changes if change.name.startswith((FILE, FOLDER))]
    copied = [change.name.removeprefix(COPIED) for change in changes if change.name.startswith(COPIED)]
    for name, old, new in changes:
        if not name.startswith((FILE, FOLDER, COPIED)):
            tell(f"resume: {name} is {shown(new)} and was {shown(old)} in the run; {_advice(name)}")
    for name, old, new in files[:MOST_TOLD]:
        tell(f"resume: {name} is {_short(new)} and was {_short(old)} in the run; {_advice(name)}")
    if len(files) > MOST_TOLD:
        tell(f"resume: {len(files) - MOST_TOLD} more files and folders that the job reads have changed")
    if copied:
        more = f" and {len(copied) - _MOST_NAMED} more" if len(copied) > _MOST_NAMED else ""
        tell(
            f"resume: the job copies the whole environment, and other values than in the run have {', '.join(f'variable.{name}' for name in copied[:_MOST_NAMED])}{more}; "
            "put back what it computes with, and read it by name"
        )


_MOST_NAMED = 10
"""So many copied variables are told by name."""


def _short(value: Any) -> str:
    """A digest as it is told."""
    return "not there" if value is ABSENT else str(value)[:12]


def _advice(name: str) -> str:
    if name.startswith(FILE):
        return "if the job computes with it, put it back, or begin a new run"
    if name.startswith(FOLDER):
        return "it has other names in it: if the job computes with them, put it back, or begin a new run"
    if name.startswith((REPLACED, STARTUP)):
        return "no field of the identity has this code: put it back, or begin a new run"
    return "it is taken for a place, which changes no bits: if the job computes with it, give it as a param"


def told_of_unknown(environment: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Warn of what the job takes of which nothing tells whether it has changed."""
    for line in environment.get(UNKNOWN, ()):
        tell(f"the job {line}, and nothing tells what that gave: {_remedy(line)}")


def _remedy(line: str) -> str:
    if line.startswith("copies"):
        return (
            "read variables by name, so that they are part of the identity, or name in identity() what counts"
        )
    return "give what it computes with as a param, or name it in identity()"


def possible_causes(environment: Mapping[str, Any]) -> str:
    """What may give other bits though no field says so, for the message of a difference that nothing else explains; nothing where there is none."""
    return ", ".join(
        [*environment.get(UNREPEATABLE, ()), *(f"it {line}" for line in environment.get(UNKNOWN, ()))]
    )
