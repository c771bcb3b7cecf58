"""How a run on Ray ends: the record and the cluster's run registry are told so, once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lockstep.attempts.mailbox import LOST
from lockstep.attempts.recording import Recording
from lockstep.checkpoint.errors import StaleAttemptError
from lockstep.clusters.core_watch import lost_core
from lockstep.clusters.run_registry import RunRegistry
from lockstep.driver.signals import was_signalled
from lockstep.errors import ClusterError, LockstepError, RecordError, first_line
from lockstep.record.events.union import EndStatus, Failed, Finished, TakenOver
from lockstep.training.problems import GPU_MEMORY


class RunEnd:
    """The end of one run. `verbose` has `say` show the details of an error that no record keeps."""

    def __init__(
        self, recording: Recording, run_registry: RunRegistry, say: Callable[[str], None], *, verbose: bool
    ) -> None:
        self._recording, self._run_registry = recording, run_registry
        self._say, self._verbose = say, verbose
        self._recorded_early_end = False
        """Whether the recorder has been told that the run ended early."""

    def finished(
        self, summary: Mapping[str, Any], files: Sequence[Path], signal_number: int | None
    ) -> RecordError | None:
        """The run has ended by itself or by a signal: have that recorded, and let the recorder write what is left.

        Returns what could not be recorded. Raises one of LOST where the recorder or the mailbox is gone.
        """
        self._recording.tell(Finished({**summary, "signal": signal_number}, files))
        return self._recording.close()

    def show(self, summary: Mapping[str, Any]) -> None:
        """Have the run registry show such an end, once it is recorded."""
        self._run_registry.ends(Finished(summary).status, summary["step"])

    def give_up(self, error: LockstepError, details: str) -> NoReturn:
        """End the run with an error, and have the record say so."""
        # What was held as the memory of a GPU ran out is in the record, also before the first step.
        keeps = isinstance(error, ClusterError) or error.code == GPU_MEMORY.code
        if self._recording.run_id is not None or keeps:
            self._tell_failed(error, details)
        elif self._verbose:  # a mistake that was found before there was a run: nothing is left of it
            self._say(details)
        raise error

    def early(self, error: BaseException) -> None:
        """The run ends with this error, which the record says too where `give_up` has not had it do so."""
        if lost_core() is not None:
            return  # the guardian has recorded it
        self._run_registry.ends(_status_of(error), 0)
        if isinstance(error, KeyboardInterrupt):
            self._tell(Failed("ended at once by a second signal", "", "KILLED"))
        elif not isinstance(error, LockstepError):
            self._tell(Failed(f"the driver failed: {first_line(error)}", traceback.format_exc()))
        elif (
            not self._recorded_early_end and self._recording.run_id is not None
        ):  # what failed was no attempt
            self._tell_failed(error, traceback.format_exc())
        try:
            self._recording.close()
        except (*LOST, ClusterError):  # its recorder is lost, and no other can be started
            if self._recording.run_id is not None and not isinstance(error, StaleAttemptError):
                self._recording.guardian.record(first_line(error), traceback.format_exc(), _status_of(error))

    def _tell_failed(self, error: LockstepError, details: str) -> None:
        if isinstance(error, StaleAttemptError):
            self._tell(TakenOver(str(error)))  # how the run ends is for the newer attempt to say
        else:
            self._tell(Failed(str(error), details, _status_of(error)))

    def _tell(self, end: Failed | TakenOver) -> None:
        """What could not be recorded of the end comes second."""
        self._recorded_early_end = True
        with suppress(*LOST):
            self._recording.tell(end)


def _status_of(error: BaseException) -> EndStatus:
    """The status of a run that an error ends."""
    return "KILLED" if was_signalled(error) else "FAILED"
