"""Whether a tracking store answers, found out in seconds and without MLflow. Nothing is made or changed."""

from __future__ import annotations

import os
import socket
import sqlite3
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from lockstep.checks import problems
from lockstep.record.mirror.store_uri import check_database, check_uri, database_path
from lockstep.record.redaction import without_uri_secrets
from lockstep.spec.locations import RECORD_OFF, check_server

ANSWER_S = 4.0
"""How long a server may take to accept a connection, and then to answer."""

_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


def store_answers(uri: str) -> str:
    """What was found of the store at `uri`, in a line. RecordError where it does not answer, or a database cannot be opened.

    SpecError for what can be no URI, and for a folder, in which MLflow keeps no runs any more.
    """
    check_server(uri)
    parts = urlsplit(uri)
    scheme = parts.scheme.partition("+")[0]
    if uri == RECORD_OFF:
        return "off: runs are recorded in folders alone"
    if scheme == "sqlite":
        return database_opens(Path(database_path(uri)))
    if scheme in {"http", "https"}:
        return _server_answers(uri)
    if scheme in _PORTS:
        return _accepts(uri, parts.hostname or "localhost", parts.port or _PORTS[scheme])
    if scheme in {"", "file"}:
        check_uri(uri)
        return f"{parts.path} is a folder, which MLFLOW_ALLOW_FILE_STORE allows"
    return f"{without_uri_secrets(uri)} was not queried: only MLflow can do that"


def database_opens(path: Path) -> str:
    """The same of an SQLite database, which is opened for reading."""
    check_database(path)
    if not path.exists():
        return f"{path} is not there yet: the first run makes it"
    try:
        with sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True) as connection:
            connection.execute("select count(*) from sqlite_master").fetchone()
        connection.close()
    except sqlite3.Error as error:
        raise problems.NO_DATABASE(path=str(path), got=error) from error
    return f"{path} opens"


def _server_answers(uri: str) -> str:
    """An MLflow server tells its version to everyone, also where it wants a password for all else."""
    parts = urlsplit(uri)
    shown = without_uri_secrets(uri)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=f"{parts.path.rstrip('/')}/version")
    try:
        with urlopen(Request(plain.geturl()), timeout=ANSWER_S) as answer:
            version = answer.read(100).decode("utf-8", errors="replace").strip()
    except HTTPError as error:
        return f"{shown} answers with status {error.code} when asked for MLflow's version"
    except (URLError, HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        raise problems.SERVER_SILENT(uri=shown, got=_words(reason)) from error
    return f"{shown} answers: MLflow {version}"


def _accepts(uri: str, host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except OSError as error:
        raise problems.DATABASE_SILENT(database=without_uri_secrets(uri), got=_words(error)) from error
    return f"{without_uri_secrets(uri)} accepts connections"


def _words(error: object) -> str:
    """A failure in the system's own words."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else str(error)
