"""The way to MLflow: importing it quietly, connecting, and its failures in one line.

* The client is given the run id in every call: no active run, no autologging, nothing global.
* Nothing is written to standard output, and MLflow's and Alembic's loggers are held at WARNING.
* A fresh database is opened by one process at a time: its first migration does not survive two. Of SQLite a file is locked for the whole
  creation of a run, of PostgreSQL its advisory lock while MLflow makes its tables.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.errors import LockstepError, RecordError, first_line
from lockstep.record import problems
from lockstep.record.errors import DeniedError, RejectedError, UnavailableError
from lockstep.record.mirror.database_lock import database_lock
from lockstep.record.mirror.store_uri import check_uri, refused, unreachable
from lockstep.record.redaction import without_uri_secrets

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the recorder tries again itself; MLflow's way blocks a call for 246 s
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
}
_REJECTED = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"})
_DENIED = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "ENDPOINT_NOT_FOUND"})
_REFUSED = frozenset(
    {
        "INVALID_STATE",
        "NOT_FOUND",
        "NOT_IMPLEMENTED",
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_ALREADY_EXISTS",
        "ALREADY_EXISTS",
        "FEATURE_DISABLED",
    }
)
"""Answers that trying again does not change."""

_REJECTED_STATUS, _DENIED_STATUS = frozenset({400, 413, 414, 415, 422, 431}), frozenset({401, 403, 404, 407})
_REFUSED_STATUS = frozenset({405, 410, 501, 505})
_FOR_GOOD = re.compile(
    r"out-of-date database schema|Can't locate revision|database disk image is malformed|file is not a database"
)
"""What a database says that neither time nor another try changes."""
_DENIED_IN_S3 = re.compile(r"\((AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|40[13])\)")
_REJECTED_IN_S3 = re.compile(r"\((EntityTooLarge|KeyTooLongError|413)\)")
_MIGRATION_LOCK = 0x6C6F636B73746570  # "lockstep"
"""The number of the advisory lock under which a PostgreSQL database is migrated."""
_OF_STORES = ("boto3.", "botocore.", "s3transfer.", "google.", "azure.")
"""Modules of the clients of object stores, whose errors are of no common class."""


@contextmanager
def connecting(uri: str) -> Iterator[tuple[Any, Path | None]]:
    """A client of the store at `uri`, and the path of its SQLite database; until the block ends no other process opens that."""
    check_uri(uri)
    import_mlflow()
    with database_lock(uri) as database, translated(uri):
        from mlflow import MlflowClient

        with _only_migration(uri) if is_database(uri) else nullcontext():
            client = MlflowClient(tracking_uri=uri)
        yield client, database


def identified(uri: str, found_id: str) -> str:
    """The id of what a store answered with. RecordError where it has none: whoever answers `{}` to everything is no MLflow server."""
    if not found_id:
        raise problems.NO_MLFLOW(uri=without_uri_secrets(uri))
    return found_id


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
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        recognised = isinstance(
            error, MlflowException | SQLAlchemyError | CommandError | OSError | ImportError
        )
        if not recognised and not type(error).__module__.startswith(_OF_STORES):
            raise
        kind = _verdict(error)
        if kind is UnavailableError:
            raise unreachable(uri, _reason(error), UnavailableError if again else RecordError) from error
        raise refused(uri, _reason(error), kind) from error


def import_mlflow() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
    except ModuleNotFoundError as error:
        if error.name != "mlflow":
            raise
        raise problems.MLFLOW_MISSING() from error
    for logger in (mlflow.__name__, "alembic"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    # It logs each failure of a database with a traceback, and raises it as well: `translated` tells it in one line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def import_store(uri: str) -> None:
    """Import what the store at `uri` needs to be opened: MLflow, and for a database what makes rows of its values."""
    import_mlflow()
    importlib.import_module("mlflow.tracking.client")
    if is_database(uri):
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
        from sqlalchemy.orm import configure_mappers

        configure_mappers()


def is_database(uri: str) -> bool:
    """Whether this process writes to a database itself; a server is asked over http."""
    return urlsplit(uri).scheme.partition("+")[0] in {"sqlite", "postgresql", "mysql", "mssql"}


@contextmanager
def _only_migration(uri: str) -> Iterator[None]:
    """Connect once, as MLflow itself would try for a hundred seconds before it says that it cannot; and let no other process migrate the database meanwhile."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri)
    try:
        with engine.connect() as connection:
            sqlalchemy.inspect(connection).get_table_names()
            if (
                engine.dialect.name == "postgresql"
            ):  # of the transaction, so that a pooler before it lets go of it too
                connection.execute(sqlalchemy.text(f"select pg_advisory_xact_lock({_MIGRATION_LOCK})"))
            else:
                connection.rollback()
            yield
    finally:
        engine.dispose()


def _verdict(error: Exception) -> type[RecordError]:
    """What became of a call: UnavailableError, DeniedError, RejectedError, or RecordError where it is refused for good."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError, SQLAlchemyError

    if _FOR_GOOD.search(str(error)):
        return RecordError
    status = _status(error)
    if status is not None:
        return _error_class(status)
    if isinstance(error, MlflowException):
        code = error.error_code
        if code in _REJECTED:
            return RejectedError
        if code in _DENIED:
            return DeniedError
        return RecordError if code in _REFUSED else UnavailableError
    if isinstance(error, SQLAlchemyError):
        return UnavailableError if isinstance(error, OperationalError) else RejectedError
    if isinstance(error, FileNotFoundError | PermissionError | ImportError):
        return RecordError
    if _DENIED_IN_S3.search(str(error)):
        return DeniedError
    return RejectedError if _REJECTED_IN_S3.search(str(error)) else UnavailableError


def _error_class(status: int) -> type[RecordError]:
    if status in _REJECTED_STATUS:
        return RejectedError
    if status in _DENIED_STATUS:
        return DeniedError
    return RecordError if status in _REFUSED_STATUS else UnavailableError


def _status(error: Exception) -> int | None:
    """The status of an answer that is not MLflow's own, but a proxy's or an artifact server's."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status is not None:
        return int(status)
    match = re.search(r"failed with error code (\d{3}) != ", str(error))
    return int(match[1]) if match else None


def _reason(error: BaseException) -> str:
    """The root of a failure in one line: the system's own words where a long chain ends in them."""
    text = str(error)
    schema = re.search(r"database schema \(found version (\w+), but expected (\w+)\)", text)
    if schema:
        return f"its tables have version {schema[1]}, those of this MLflow {schema[2]}"
    system = re.search(r"\[Errno -?\d+\] ([^\n'\")]+)", text)
    if system:
        return system.group(1)
    return re.sub(r" at 0x[0-9a-f]+", "", first_line(error))[:500]  # the same outage has the same words
