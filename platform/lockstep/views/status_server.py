"""The status of a run over HTTP on loopback: as JSON at `/`, and as metrics of Prometheus at `/metrics`.

It reads the record, as `lockstep status` does, so it may run beside the run or long after it. A status is read anew for a request at most once in `FRESH_S`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lockstep.errors import LockstepError
from lockstep.views.status import RunStatus

HOST = "127.0.0.1"
FRESH_S = 1.0
_LOOPBACK = ("127.0.0.1", "localhost")

_HELP = {
    "step": "Optimizer steps that the run has done",
    "steps": "The most steps that the run takes",
    "eta_seconds": "Seconds until its last step",
    "effective_ratio": "Share of the time since the run began that went into steps that count",
    "last_checkpoint_step": "The newest step with a checkpoint",
    "workers": "Workers of the run",
    "away_seconds": "Seconds since the run began in which no command was at it",
    "interruptions": "How often the run was interrupted, other than as planned",
    "lost_worker_hours": "Hours of workers that interruptions of the run took",
}


def metrics(status: RunStatus) -> str:
    """A status in the text format of Prometheus; what is not known has no sample."""
    values = (
        status.step,
        status.steps,
        status.eta_s,
        status.effective,
        status.last_checkpoint,
        status.workers,
        status.away_s,
        status.interruptions,
        status.lost_worker_h,
    )
    run = f'run="{status.run_id}"'
    lines = []
    for (name, text), value in zip(_HELP.items(), values, strict=True):
        if value is not None:
            key = f"lockstep_run_{name}"
            lines += [f"# HELP {key} {text}", f"# TYPE {key} gauge", f"{key}{{{run}}} {value!r}"]
    key = "lockstep_run_state"
    lines += [f"# HELP {key} 1 for the state of the run", f"# TYPE {key} gauge"]
    lines.append(f'{key}{{{run},state="{status.state}"}} 1')
    return "\n".join(lines) + "\n"


class StatusServer(ThreadingHTTPServer):
    """Serves what `read` gives, on loopback alone, for `fresh_s` seconds. `port` 0 takes a free one; OSError where the port is taken."""

    daemon_threads = True

    def __init__(self, read: Callable[[], RunStatus], port: int, fresh_s: float = FRESH_S) -> None:
        self._read, self._fresh_s = read, fresh_s
        self._lock = threading.Lock()
        self._newest: tuple[float, RunStatus] | None = None
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.server_address[1]}"

    def status(self) -> RunStatus:
        """The status, read anew unless that was a moment ago. Raises what reading the record raises."""
        with self._lock:
            if self._newest is None or time.monotonic() - self._newest[0] >= self._fresh_s:
                self._newest = time.monotonic(), self._read()
            return self._newest[1]


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer

    def do_GET(self) -> None:
        # A page of another site could name this address by a host name of its own, and read the answer.
        if self.headers.get("Host", "").rpartition(":")[0] not in _LOOPBACK:
            self._answer(HTTPStatus.FORBIDDEN, "wanted a host name of loopback\n")
            return
        forms = {"/": _as_json, "/metrics": metrics}
        if self.path not in forms:
            self._answer(HTTPStatus.NOT_FOUND, "wanted / or /metrics\n")
            return
        try:
            text = forms[self.path](self.server.status())
        except LockstepError as error:  # the store does not answer now; the next request asks it again
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")
            return
        kind = "application/json" if self.path == "/" else "text/plain; version=0.0.4; charset=utf-8"
        self._answer(HTTPStatus.OK, text, kind)

    def _answer(self, code: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is that of its base
        pass


def _as_json(status: RunStatus) -> str:
    return json.dumps(status.as_dict()) + "\n"
