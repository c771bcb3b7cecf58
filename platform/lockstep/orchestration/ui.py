"""The MLflow UI on a run store, with the settings that work."""

from __future__ import annotations

import os
import sys

UI_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # seven processes and 1.6 GB for what runs do not use
}


def ui_command(uri: str, port: int) -> list[str]:
    """The command that serves the UI of the store at `uri`, on loopback only.

    One worker: with more, every request over a kept connection waits some 44 ms (Kludex/uvicorn#3149).
    """
    return [
        sys.executable, "-m", "mlflow", "server",
        "--backend-store-uri", uri, "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
    ]  # fmt: skip


def serve_ui(uri: str, port: int) -> None:
    """Become the UI's server; does not return."""
    command = ui_command(uri, port)
    os.execve(command[0], command, {**os.environ, **UI_SETTINGS})
