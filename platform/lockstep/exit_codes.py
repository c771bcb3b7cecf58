"""The exit codes of the command, in one table: docs/cli.md shows it, and whatever ends a command names its entry."""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended. Its number is part of Lockstep's interface: scripts, queues and Kubernetes go by it."""

    meaning: str
    """What it says, in Markdown."""
    raised: str
    """By which commands, in Markdown."""

    def __new__(cls, number: int, meaning: str, raised: str) -> ExitCode:
        code = int.__new__(cls, number)
        code._value_ = number
        code.meaning, code.raised = meaning, raised
        return code

    DONE = (0, "done", "every command")
    FAILED = (
        1,
        "the run failed, part of its record could not be written, a check failed, or `verify`, `diff`, `guard` or `replay` found a difference",
        "every command that does something",
    )
    REFUSED = (
        2,
        "the spec, an override, the job's name or the usage is wrong; in `verify`, `diff`, `guard`, `replay` and `attest`, anything that "
        "leaves them without an answer, such as a record that cannot be read",
        "every command, before it changes anything",
    )
    MAY_PASS = (
        75,  # EX_TEMPFAIL of sysexits.h
        "with `--retries`: the run ended for a reason that may pass, such as the loss of too many workers",
        "`train`, `resume`, in a job of a cluster",
    )
    HUNG_UP = (129, "stopped by SIGHUP: its terminal was closed", "every command")
    INTERRUPTED = (130, "stopped by SIGINT (Ctrl-C)", "every command")
    TERMINATED = (143, "stopped by SIGTERM, or by `ray job stop`", "every command")


def code_of_signal(number: int) -> ExitCode:
    """That of a command which signal `number`, one of STOP_SIGNALS, has stopped."""
    return _BY_SIGNAL[signal.Signals(number)]


_BY_SIGNAL = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HUNG_UP,
}

STOP_SIGNALS = tuple(_BY_SIGNAL)
"""The signals by which a person, a queue or a terminal that goes away asks a command to stop."""

SIGNALLED = frozenset(_BY_SIGNAL.values())
"""Those of a command that a signal has stopped."""

DECIDED = frozenset(ExitCode) - {ExitCode.MAY_PASS}
"""Those of a run that ended by its own decision: finished, failed, refused, stopped by a signal. Any other is a loss of its driver."""


def table() -> str:
    """The table of docs/cli.md."""
    rows = [f"| {int(code)} | {code.meaning} | {code.raised} |" for code in ExitCode]
    return "\n".join(["| code | means | from |", "|---|---|---|", *rows])
