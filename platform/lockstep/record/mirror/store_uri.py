"""What can be said of a tracking URI without MLflow, and advice for a store that fails: one line each."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from lockstep.errors import RecordError
from lockstep.record import problems
from lockstep.record.redaction import without_uri_secrets
from lockstep.spec.locations import check_server

_START = "start it, name another with --uri, or set record.uri=off"
_NAME = "or name another with --uri"
_REMEDIES = {
    "disk is full": f"make room on its disk, {_NAME}",
    "No space left on device": f"make room on its disk, {_NAME}",
    "not a database": f"it is a file of another kind: move it away, {_NAME}",
    "malformed": f"the file is damaged: put a copy of it back, or move it away, {_NAME}",
    "readonly database": f"make the file and its folder writable, {_NAME}",
    "unable to open database file": f"see that its folder can be written, {_NAME}",
    "database is locked": f"another process writes to it: wait until it has ended, {_NAME}",
    "its tables have version": f"another version of MLflow made it: install that version, or, if it is an older one, back the database up and run `mlflow db upgrade`, {_NAME}",
    "Can't locate revision": f"a newer MLflow, or another program, made it: install that version of MLflow, {_NAME}",
    "No module named 'psycopg": "give a URI that begins with postgresql+psycopg://, and pip install 'lockstep-train[stores]'",
}
"""Advice, by words in a store's error."""


_OF_MLFLOW = frozenset({"alembic_version", "experiments", "runs", "metrics", "params", "tags"})
"""Tables of an MLflow database. One that was killed while it was created has some of them."""


def remedy(reason: str) -> str:
    """Advice for a store that fails for this reason; empty if there is none."""
    return next((advice for words, advice in _REMEDIES.items() if words in reason), "")


def unreachable(uri: str, reason: str, kind: type[RecordError]) -> RecordError:
    """The error of a store that does not answer."""
    return problems.UNREACHABLE(
        uri=without_uri_secrets(uri), got=without_uri_secrets(reason), remedy=remedy(reason) or _START
    ).as_kind(kind)


def refused(uri: str, reason: str, kind: type[RecordError]) -> RecordError:
    """The error of a store that refuses a call."""
    return problems.REFUSES(uri=without_uri_secrets(uri), got=reason, remedy=remedy(reason)).as_kind(kind)


def check_uri(uri: str) -> None:
    """Check what the URI names, and change nothing.

    SpecError for what can be no URI, for a folder, in which MLflow no longer stores runs, and as `database_path`; RecordError for a file that is not
    an intact SQLite database.
    """
    check_server(uri)
    scheme = urlsplit(uri).scheme
    if (scheme == "file" or uri.startswith("/")) and not _folders_allowed():
        raise problems.FOLDER_URI(got=uri)
    if scheme == "sqlite":
        check_database(Path(database_path(uri)))


def database_path(uri: str) -> str:
    """The path in the URI of a SQLite database. SpecError for one that SQLAlchemy takes for another path: it decodes %41, and ends at a `?`."""
    path, _, options = uri.partition(":///")[2].partition("?")
    if unquote(path) != path or "/" in options:
        raise problems.ODD_PATH(got=uri)
    return path


def _folders_allowed() -> bool:
    """Whether MLflow itself is allowed to use folders."""
    return os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in {"true", "1"}


def check_database(path: Path) -> None:
    """SpecError for a folder or another program's database, RecordError for a damaged file or one that is not a SQLite database.

    A missing or empty file is fine: MLflow will create the database.
    """
    if path.is_dir():
        raise problems.DATABASE_IS_FOLDER(path=path)
    if not path.is_file():
        return
    try:
        # Not read-only: after a loss of power, an unfinished transaction must be rolled back first.
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True)) as connection:
            tables = {
                name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")
            }
    except sqlite3.OperationalError:
        return  # it is locked, or its disk fails: the code that opens it deals with that, and may wait
    except sqlite3.DatabaseError as error:
        advice = remedy(str(error)) or _NAME.removeprefix("or ")
        raise problems.DATABASE_DAMAGED(path=path, got=error, remedy=advice) from error
    if tables and not tables & _OF_MLFLOW:
        raise problems.OTHER_PROGRAM(path=path, got=min(tables))
