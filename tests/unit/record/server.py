"""A real MLflow tracking server on loopback, that a test may kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType


class Server:
    """`backend` is a database's URI, `artifacts` where files go: through the server, or past it where that is `direct`."""

    def __init__(
        self,
        folder: Path,
        backend: str = "",
        app: str = "",
        environment: Mapping[str, str] | None = None,
        artifacts: str = "",
        *,
        direct: bool = False,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._backend = backend or f"sqlite:///{folder}/server.db"
        self._app = ["--app-name", app] if app else []
        place = artifacts or str(folder / "artifacts")
        self._artifacts = (
            ["--no-serve-artifacts", "--default-artifact-root", place]
            if direct
            else ["--artifacts-destination", place]
        )
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        command = [
            sys.executable, "-m", "mlflow", "server", *self._app,
            "--backend-store-uri", self._backend, *self._artifacts,
            "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
        ]  # fmt: skip
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env={**self._environment, **quiet}, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + 90
        while not self._answers():
            assert time.monotonic() < until, (self._folder / "server.log").read_text()[-3000:]
            assert self._process.poll() is None, (self._folder / "server.log").read_text()[-3000:]
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL to the server and its children: nothing is said goodbye to."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
