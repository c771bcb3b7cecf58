"""Jobs that end in a certain way at a certain step."""

from __future__ import annotations

import os
import signal

from torch import nn

from tests.faulty_jobs.jobs import Sound


class Stopped(Sound):
    """Asks, by a signal, for the end of its run while step 7 goes on; a run that is taken up is past that."""

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)


class Failing(Sound):
    """Fails in step 7."""

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 7:
            raise RuntimeError("the coffee machine is broken, password='hunter2-hunter2'")
