"""Where the `lockstep` command begins: before it imports what it needs, it starts over where its own process is to train."""

from __future__ import annotations

import os
import signal
import sys
import time


def run() -> None:
    """Entry point of the command."""
    # Python reads PYTHONHASHSEED when it starts: a run in this very process has to start over with 0, whatever it was.
    if trains_here(sys.argv[1:]) and sys.flags.hash_randomization:
        from lockstep.exit_codes import STOP_SIGNALS
        from lockstep.training.worker_environment import sent_environment

        os.environ |= {**sent_environment(), "LOCKSTEP_BEGAN_AT": repr(time.time())}
        # Until the interpreter that takes this one's place takes them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "lockstep", *sys.argv[1:]])
    from lockstep.cli.main import run_command

    run_command()


def trains_here(words: list[str]) -> bool:
    """Whether a command of these words trains in its own process."""
    return words[:1] in (["lr-find"], ["check"], ["estimate"]) or (
        "--local" in words and words[:1] != ["verify"]
    )
