"""The way to MLflow: importing it quietly, connecting, and its failures in one line.

* The client is given the run id in every call: no active run, no autologging, nothing global.
* Nothing is written to standard output, and MLflow's and Alembic's loggers are held at WARNING.
* A fresh SQLite database is opened by one process at a time: its first migration does not survive two.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.errors import RecordError, first_line
from lockstep.record.database_lock import database_lock
from lockstep.record.documents import without_password
from lockstep.record.run_store import UnavailableError, unreachable

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the recorder tries again itself; MLflow's way blocks a call for 246 s
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
}
_REFUSED = frozenset(
    {
        "INVALID_PARAMETER_VALUE",
        "BAD_REQUEST",
        "MALFORMED_REQUEST",
        "INVALID_STATE",
        "NOT_FOUND",
        "ENDPOINT_NOT_FOUND",
        "NOT_IMPLEMENTED",
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_ALREADY_EXISTS",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "CUSTOMER_UNAUTHORIZED",
        "FEATURE_DISABLED",
    }
)
"""Answers that trying again does not change."""


@contextmanager
def connecting(uri: str) -> Iterator[tuple[Any, Path | None]]:
    """A client of the store at `uri`, and the path of its SQLite database; until the block ends no other process opens that."""
    import_mlflow()
    with database_lock(uri) as database, translated(uri):
        if is_database(uri):
            _probe(uri)
        from mlflow import MlflowClient

        yield MlflowClient(tracking_uri=uri), database


def page_url(uri: str, experiment_id: str, run_id: str) -> str:
    """A link that lands on a run's page, or nothing where the store is a database."""
    if is_database(uri):
        return ""
    parts = urlsplit(uri)
    base = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    return f"{base}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


@contextmanager
def translated(uri: str, *, again: bool = True) -> Iterator[None]:
    """MLflow's failures as ours, in one line: UnavailableError where trying again may help."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError, ImportError) as error:
        if _is_final(error):
            message = f"record.uri: {without_password(uri)!r} refuses: {_reason(error)}"
            raise RecordError(message) from error
        raise (UnavailableError if again else RecordError)(unreachable(uri, _reason(error))) from error


def import_mlflow() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
    except ModuleNotFoundError as error:
        if error.name != "mlflow":
            raise
        raise RecordError(
            "record.uri: mlflow is not installed; pip install mlflow, or set record.uri=off"
        ) from error
    for logger in (mlflow.__name__, "alembic"):
        logging.getLogger(logger).setLevel(logging.WARNING)


def is_database(uri: str) -> bool:
    """Whether this process writes to a database itself; a server is asked over http."""
    return urlsplit(uri).scheme.partition("+")[0] in {"sqlite", "postgresql", "mysql", "mssql"}


def _probe(uri: str) -> None:
    """Connect once: MLflow itself would try for a hundred seconds before it says that it cannot."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri)
    try:
        sqlalchemy.inspect(engine).get_table_names()
    finally:
        engine.dispose()


def _is_final(error: Exception) -> bool:
    """Whether the same call would fail again: it was refused, or names what is not there."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError, SQLAlchemyError

    if isinstance(error, MlflowException):
        return error.error_code in _REFUSED
    if isinstance(error, SQLAlchemyError):
        return not isinstance(error, OperationalError)
    return isinstance(error, FileNotFoundError | PermissionError | ImportError)


def _reason(error: BaseException) -> str:
    """The root of a failure in one line: the system's own words where a long chain ends in them."""
    text = str(error)
    system = re.search(r"\[Errno -?\d+\] ([^\n'\")]+)", text)
    if system:
        return system.group(1)
    return first_line(error)[:500]
