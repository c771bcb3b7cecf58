"""Reports a run's failure to the caller: what happened, in which run, and where the traceback is."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import LockstepError


def with_run(error: LockstepError, run_id: str | None, folder: Path) -> LockstepError:
    """The same error, with the run's id and the file that holds its traceback, or how to see that where no run began."""
    if run_id is None:
        return error.with_message(f"{error}; --verbose shows the traceback") if error.unclear else error
    traceback = folder / run_id / "error.txt"
    where = f"in {str(traceback)!r}" if traceback.exists() else "in its error.txt"
    return error.with_message(f"{error}; run {run_id}, whose traceback is {where}")
