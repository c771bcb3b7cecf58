"""The result of a run, from the summary that its workers agreed on."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from lockstep.driver.result import Result, result_of


def summary(first_step_at: float | None) -> dict[str, Any]:
    given = set(inspect.signature(result_of).parameters)
    rest = (
        {one.name for one in fields(Result)}
        - given
        - {"status", "first_step_s", "effective", "lost_worker_h"}
    )
    return {**dict.fromkeys(rest), "stopped": False, "first_step_at": first_step_at}


@pytest.mark.parametrize(
    ("first_step_at", "wanted"),
    [(1002.5, 2.5), (None, None), (400.0, None)],
    ids=["a step of its own", "no step", "the step of an earlier attempt"],
)
def test_the_time_to_the_first_step_is_the_commands_own(
    first_step_at: float | None, wanted: float | None
) -> None:
    """A resume of a finished run takes none: its summary is that of the attempt which finished, minutes before the command began."""
    result = result_of(
        summary(first_step_at),
        run_id="run",
        url="",
        tracking_uri="off",
        folder="",
        began_at=1000.0,
        start={"command": 1000.5, "detection": 9999.0},
        warnings=[],
        attempts=1,
        signal_number=None,
    )
    assert result.first_step_s == wanted
    assert result.start == ({} if wanted is None else {"command": 0.5, "first_step": 2.0})
