"""Digits of which four workers lose two around the evaluation of step 6: worker 0 once all but worker 2 have its last message, then worker 2 as it hands its state over."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from lockstep.training.elastic import recovery
from lockstep.training.evaluation.evaluation_schedule import Evaluations
from lockstep.training.integrity.agreement import Agreement
from tests.distributed.real_jobs import FewDigits

_evaluating, _is_behind = [False], [False]
_make, _check, _hand_over = Evaluations._make, Agreement.check, recovery.hand_over


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _made(self: Any, position: Any, labels: Any) -> None:
    _evaluating[0] = position.number == 6
    try:
        _make(self, position, labels)
    finally:
        _evaluating[0] = False


def _checked(self: Any) -> Any:
    held = _check(self)
    if _evaluating[0] and self._group.size == 4:
        if self._group.rank == 0:
            time.sleep(0.3)
            _end()
        if self._group.rank == 2:
            _is_behind[0] = True
            time.sleep(0.6)
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
    return held


def _handed_over(*arguments: Any) -> None:
    if _is_behind[0]:
        _end()
    _hand_over(*arguments)


class Digits(FewDigits):
    """Worker 2 ends, too."""

    def __init__(self, params: FewDigits.Params) -> None:
        super().__init__(params)
        Evaluations._make, Agreement.check, recovery.hand_over = _made, _checked, _handed_over  # type: ignore[method-assign,assignment]
