"""A lock beside a SQLite database: only one process at a time makes its tables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import RecordError
from lockstep.files import NoLocksError, lock
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
        raise RecordError(
            f"record.uri: cannot write beside {str(database)!r}: {error.strerror or error}; name another database with --uri"
        ) from error
    with file:  # closing it releases the lock
        _take(file.fileno(), database)
        yield database


def _database(uri: str) -> Path | None:
    if not uri.startswith("sqlite"):
        return None
    path = database_path(uri)
    if path in {"", ":memory:"}:
        raise RecordError(
            f"record.uri: got {uri!r}, which is gone with its process; wanted a file: sqlite:///mlflow.db"
        )
    return Path(path).absolute()


def _take(descriptor: int, database: Path) -> None:
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            lock(descriptor)
            return
        except NoLocksError as error:
            raise RecordError(
                f"record.uri: no file can be locked on the file system of {str(database)!r} ({error.strerror}), and SQLite needs "
                "locks; name a database elsewhere, or a server, with --uri"
            ) from error
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise RecordError(
                    f"record.uri: another process has been opening {str(database)!r} for {_PATIENCE_S:.0f} s; "
                    "stop it, or name another database with --uri"
                ) from error
            time.sleep(0.02)
