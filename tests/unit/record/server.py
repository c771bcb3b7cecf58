"""A real MLflow tracking server on loopback, that a test may kill and start again."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.empty_store import put_empty_store
from tests.forked import Forked
from tests.ports import free_port


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
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._backend = backend or put_empty_store(folder / "server.db")
        self._app = ["--app-name", app] if app else []
        place = artifacts or str(folder / "artifacts")
        self._artifacts = (
            ["--no-serve-artifacts", "--default-artifact-root", place]
            if direct
            else ["--artifacts-destination", place]
        )
        self._environment = {**os.environ, **(environment or {})}
        self._process: Forked | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        words = [
            *self._app, "--backend-store-uri", self._backend, *self._artifacts,
            "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
        ]  # fmt: skip
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._process = Forked(_serve, words, env={**self._environment, **quiet})
        until = time.monotonic() + 90
        while not self._answers():
            assert time.monotonic() < until
            assert self._process.poll() is None, self._process.communicate()[1][-3000:]
            time.sleep(0.05)

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


def _serve(words: list[str]) -> None:
    """`mlflow server`, which would start uvicorn in one more process."""
    import mlflow.cli
    import mlflow.server
    import uvicorn.main

    def here(command: list[str], extra_env: Mapping[str, str], **_: object) -> None:
        os.environ.update(extra_env)
        uvicorn.main.main(command[command.index("uvicorn") + 1 :])

    mlflow.server._exec_cmd = here
    mlflow.cli.server(words)
