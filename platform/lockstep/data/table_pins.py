"""Which version of each changing table a run reads: looked up when the run begins, and the same in all that follows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import PurePosixPath
from typing import Any

FIELD = "data.snapshot."
"""How the field of a table's version begins in the identity of a run; the table's name follows."""


class Pins:
    """The versions of the tables that a job opens: those that are `fixed` by the name of the table, and those that were looked up."""

    def __init__(self, fixed: Mapping[str, str]) -> None:
        self.fixed = dict(fixed)
        self._names: dict[tuple[str, str], str] = {}
        self.opened: dict[str, str] = {}
        """The versions by the names of the tables."""

    def version(self, format_name: str, location: str, newest: Callable[[], str]) -> str:
        """The version of a table: one that is opened again has the one it had."""
        name = self._name(format_name, location)
        if name not in self.opened:
            self.opened[name] = self.fixed.get(name) or newest()
        return self.opened[name]

    def _name(self, format_name: str, location: str) -> str:
        """A table's name: its folder's, by which it is known also where it was moved, and a number where several have it."""
        key = (format_name, location.rstrip("/"))
        if key not in self._names:
            name = PurePosixPath(key[1]).name
            count = sum(PurePosixPath(path).name == name for _, path in self._names)
            self._names[key] = f"{name}.{count + 1}" if count else name
        return self._names[key]

    def fields(self) -> dict[str, str]:
        """As fields of the identity."""
        return {f"{FIELD}{name}": version for name, version in sorted(self.opened.items())}


_now: list[Pins] = []
"""The pins in force, the innermost last. Of the whole process: a job may open its tables in threads."""


@contextmanager
def pinned(versions: Mapping[str, str]) -> Iterator[Pins]:
    """Have the tables that are opened in the block read these versions, by name, or else those of a block around it, or the newest."""
    outer = _now[-1].fixed if _now else {}
    pins = Pins({**outer, **versions})
    _now.append(pins)
    try:
        yield pins
    finally:
        _now.remove(pins)


def in_force() -> AbstractContextManager[Pins]:
    """The pins of the block around, or new ones for the block."""
    return nullcontext(_now[-1]) if _now else pinned({})


def version_of(format_name: str, location: str, newest: Callable[[], str]) -> str:
    """The version of a table that no job has named: that of the run, or the newest where the table is opened outside of a run."""
    return _now[-1].version(format_name, location, newest) if _now else newest()


def pins_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """The versions that a run began with, from the fields of its identity."""
    return {
        name.removeprefix(FIELD): str(version) for name, version in fields.items() if name.startswith(FIELD)
    }
