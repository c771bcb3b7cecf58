"""Notifications: a command of the user's is told of a run's start, failure and end.

It runs beside the training, in a session of its own and for LIMIT_S at most; the end of the run waits for it. How it ends changes
nothing of the run: the first time that it fails is a warning. It is the caller's, and no part of the spec or the record: a run that
someone resumes from a shared store must not bring a command along.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import urlsplit

from lockstep.checkpoint.errors import StaleAttemptError
from lockstep.driver import problems
from lockstep.driver.signals import was_signalled
from lockstep.errors import SpecError
from lockstep.record.events.union import Alerted
from lockstep.record.redaction import redacted

LIMIT_S = 30.0
"""How long the command may take."""

VARIABLE = "LOCKSTEP_NOTIFY"
"""Environment variable with the command, where no option gives one. The command itself does not inherit it."""

WEBHOOK = "LOCKSTEP_WEBHOOK"
"""The same for the address that gets each notification."""

_LONGEST_VARIABLE = 10_000
"""Characters; Linux refuses a variable of 128 KiB."""

_TOLD_CHARACTERS = 200
"""Of what a command that fails has printed last."""


EventName = Literal["start", "failure", "end", "alert"]


@dataclass(frozen=True, slots=True)
class Notification:
    """What the command is told: each as the environment variable `LOCKSTEP_<NAME>`, all as JSON on standard input."""

    event: EventName
    status: str
    run_id: str
    """Empty where a run failed before it existed."""
    step: int
    """The last step that is done."""
    error: str
    folder: str
    """That of the run's record."""
    alert: str = ""
    """The rule that has fired, for an alert."""
    evidence: str = ""
    """What it has fired for."""


class Notifications:
    """Runs `command`, words or a text for the shell, for the events of one run below `folder`. `say` shows a line to the user."""

    def __init__(
        self,
        command: str | Sequence[str] | None,
        folder: Path,
        say: Callable[[str], None],
        run_id: str | None = None,
        *,
        webhook: str | None = None,
    ) -> None:
        if webhook is not None and urlsplit(webhook).scheme not in ("http", "https"):
            raise problems.WEBHOOK(got=redacted(webhook))
        self._command, self._folder, self._say, self._run_id = command, folder, say, run_id
        self._webhook = webhook
        self._running: list[threading.Thread] = []
        self.warnings: list[str] = []
        """How the command failed, the first time that it did."""

    def began(self, run_id: str, step: int) -> None:
        """The run exists, and goes on after `step`. Returns at once."""
        self._run_id = run_id
        self._tell("start", "RUNNING", step)

    def alerted(self, alert: Alerted) -> None:
        """An alert of the run has fired. Returns at once."""
        self._tell("alert", "RUNNING", alert.step, alert=alert.rule, evidence=redacted(alert.evidence))

    def ended(self, status: str, step: int) -> None:
        """The run came to its end, or was stopped. Returns when the command has ended."""
        self.wait()  # for the start: what is told comes in order
        self._tell("end", status, step)
        self.wait()

    def failed(self, error: BaseException, step: int) -> None:
        """What this command did of the run ended with an error, likewise.

        Not told is that another command has taken the run over, for its end is that one's to tell, and a mistake that was found
        before there was a run.
        """
        if was_signalled(error):
            self.ended("KILLED", step)
            return
        self.wait()
        if isinstance(error, StaleAttemptError) or (isinstance(error, SpecError) and self._run_id is None):
            return
        self._tell("failure", "FAILED", step, redacted(str(error)))
        self.wait()

    def lost(self, message: str, status: str, step: int) -> None:
        """The run ended with `message`, and this process tells so for one that could not, likewise."""
        if status == "KILLED":
            self.ended(status, step)
        else:
            self._tell("failure", status, step, redacted(message))
            self.wait()

    def _tell(
        self, event: EventName, status: str, step: int, error: str = "", alert: str = "", evidence: str = ""
    ) -> None:
        folder = str(self._folder / self._run_id) if self._run_id else ""
        notification = Notification(event, status, self._run_id or "", step, error, folder, alert, evidence)
        if self._webhook:
            self._begin(threading.Thread(
                target=self._post, args=(notification,), name="lockstep-webhook", daemon=True
            ))  # fmt: skip
        if not self._command:
            return
        try:
            process, output = _started(self._command, notification)
        except OSError as failure:
            self._warn(event, f"cannot be started: {failure.strerror or failure}")
            return
        # A thread waits; the process was started before, for a fork of a loader process may come between.
        waiting = threading.Thread(
            target=self._await, args=(process, output, event), name="lockstep-notify", daemon=True
        )
        self._begin(waiting)

    def _begin(self, thread: threading.Thread) -> None:
        thread.start()
        self._running.append(thread)

    def _post(self, notification: Notification) -> None:
        """Send a notification to the webhook, again after a while where it does not answer."""
        assert self._webhook is not None
        request = urllib.request.Request(
            self._webhook,
            json.dumps(asdict(notification)).encode(),
            {"Content-Type": "application/json", "User-Agent": "lockstep"},
        )
        failure = ""
        for pause_s in (0.0, 1.0, 3.0):
            time.sleep(pause_s)
            try:
                with urllib.request.urlopen(request, timeout=LIMIT_S / 3):
                    return
            except urllib.error.HTTPError as error:
                failure = f"was answered with status {error.code}"
                if error.code < 500:
                    break
            except (OSError, http.client.HTTPException) as error:
                failure = f"does not answer: {redacted(str(getattr(error, 'reason', error)))}"
        self._warn(notification.event, failure, channel="webhook")

    def wait(self) -> None:
        """Wait until everything is told."""
        while self._running:
            self._running.pop().join()

    def _await(self, process: subprocess.Popen[bytes], output: IO[bytes], event: str) -> None:
        with output:
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._warn(event, f"did not end within {LIMIT_S:g} s, and was ended")
                return
            if code:
                self._warn(event, f"ended with exit code {code}{_last_line(output)}")

    def _warn(self, event: str, failure: str, *, channel: str = "command") -> None:
        if not self.warnings:
            option = "notify" if channel == "command" else channel
            self.warnings.append(f"{option}: the {channel} for the {event} of the run {failure}")
            self._say(f"warning: {self.warnings[0]}")


def _started(
    command: str | Sequence[str], notification: Notification
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """The command's process, and what it prints. Files, for a pipe is also held by what the command leaves behind."""
    values: dict[str, Any] = asdict(notification)
    variables = {f"LOCKSTEP_{name.upper()}": _variable(str(value)) for name, value in values.items()}
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, WEBHOOK)}
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the thread that waits
    with tempfile.TemporaryFile() as input_file:
        input_file.write(json.dumps(values).encode())
        input_file.seek(0)
        try:
            return (
                subprocess.Popen(
                    command,
                    shell=isinstance(command, str),
                    env=environment | variables,
                    stdin=input_file,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                ),
                output,
            )
        except BaseException:
            output.close()
            raise


def _variable(text: str) -> str:
    """A text as an environment takes it, whatever an error quotes: without NUL, and not longer than the system allows."""
    return text.replace("\0", "").encode(errors="replace").decode()[:_LONGEST_VARIABLE]


def _last_line(output: IO[bytes]) -> str:
    output.seek(0, os.SEEK_END)
    output.seek(max(0, output.tell() - 4096))
    lines = output.read().decode(errors="replace").split("\n")
    text = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {redacted(text)[-_TOLD_CHARACTERS:]}" if text else ""
