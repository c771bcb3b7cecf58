"""A lock beside a SQLite database: only one process at a time makes its tables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.files import NoLocksError, lock, unlock
from lockstep.record import problems
from lockstep.record.mirror.store_uri import database_path

_PATIENCE_S = 60.0


@contextmanager
def database_lock(uri: str) -> Iterator[Path | None]:
    """Hold `<database>.lock` while a SQLite database is opened. Yields the database's path, or None for another kind of store.

    Without it, when eight processes opened one fresh database at once, seven of them were seen to fail.
    """
    database = _database(uri)
    if database is None:
        yield None
        return
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        file = database.with_name(f"{database.name}.lock").open("ab")
    except OSError as error:
        raise problems.BESIDE_DATABASE(database=database, got=error.strerror or error) from error
    with file:
        _take(file.fileno(), database)
        try:
            yield database
        finally:
            unlock(file.fileno())


def _database(uri: str) -> Path | None:
    if not uri.startswith("sqlite"):
        return None
    path = database_path(uri)
    if path in {"", ":memory:"}:
        raise problems.IN_MEMORY(got=uri)
    return Path(path).absolute()


def _take(descriptor: int, database: Path) -> None:
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            lock(descriptor)
            return
        except NoLocksError as error:
            raise problems.DATABASE_LOCKS(database=database, got=error.strerror) from error
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise problems.DATABASE_BUSY(database=database, waited_s=f"{_PATIENCE_S:.0f}") from error
            time.sleep(0.02)
