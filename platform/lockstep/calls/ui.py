"""The MLflow UI on a run store, with the settings that work, and never open to others without a password."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lockstep.calls import problems
from lockstep.clusters.authentication import is_loopback, write_secret
from lockstep.clusters.local_cluster import state_folder
from lockstep.record.mirror.store_uri import check_uri

UI_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # seven processes and 1.6 GB for what runs do not use
}

PASSWORD, USERS = "MLFLOW_AUTH_ADMIN_PASSWORD", "MLFLOW_AUTH_CONFIG_PATH"
"""MLflow's own variables: the first user's password, and a configuration with users of its own."""

SHORTEST_PASSWORD = 12


def ui_command(port: int, host: str) -> list[str]:
    """The command that serves the UI; beyond loopback with basic auth and a check of the Host header.

    One worker: with more, every request over a kept connection waits some 44 ms (Kludex/uvicorn#3149).
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "mlflow",
        "server",
        "--host",
        host,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    if is_loopback(host):
        return command
    names = ",".join(f"{name}:{port}" for name in names_of(host))
    return [*command, "--app-name", "basic-auth", "--allowed-hosts", names]


def names_of(host: str) -> list[str]:
    """The names under which a server on `host` may be asked for."""
    if host not in {"0.0.0.0", "::"}:
        return [host, "127.0.0.1", "localhost"]
    addresses = {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    return sorted({socket.gethostname(), socket.getfqdn(), "localhost", *addresses})


def guarded(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What a server on `host` has to find in its environment. SpecError where it would be open to others without a password."""
    if is_loopback(host):
        return {}
    if not environment.get(USERS) and len(environment.get(PASSWORD, "")) < SHORTEST_PASSWORD:
        raise problems.UI_WITHOUT_PASSWORD(got=host, password=PASSWORD, least=SHORTEST_PASSWORD, users=USERS)
    required = {"MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32)}
    if not environment.get(USERS):
        required[USERS] = str(_write_users(state_folder()))
    return {name: value for name, value in required.items() if not environment.get(name)}


def _write_users(folder: Path) -> Path:
    """MLflow's configuration of a user database that only this user can read; the password is not in it."""
    path = folder / "mlflow_auth.ini"
    write_secret(
        path,
        "[mlflow]\ndefault_permission = NO_PERMISSIONS\n"
        f"database_uri = sqlite:///{folder}/mlflow_users.db\nadmin_username = admin\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        "auth_cache_ttl_seconds = 60\n",  # else each request takes 0.2 s to hash its password
    )
    return path


class Ui:
    """The UI of the store at `uri`. SpecError as `guarded`, StorageError where its users cannot be kept.

    SpecError and RecordError as well where the URI names what can be no store.
    """

    def __init__(self, uri: str, port: int, host: str = "127.0.0.1") -> None:
        check_uri(uri)
        if not 0 < port < 65536:
            raise problems.PORT(got=port)
        self.link = f"http://{host}:{port}/#/experiments?workflowType=machine_learning"
        self._command = ui_command(port, host)
        # The URI may hold a password, which a command line would show.
        store = {"MLFLOW_BACKEND_STORE_URI": uri}
        # MLflow starts another interpreter, which must not import what lies in this folder either.
        own_modules = {"PYTHONSAFEPATH": "1"}
        self._environment = {**os.environ, **UI_SETTINGS, **own_modules, **store, **guarded(host, os.environ)}

    def serve(self) -> None:
        """Become its server; does not return."""
        os.umask(0o077)
        os.execve(self._command[0], self._command, self._environment)
