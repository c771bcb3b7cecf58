"""What can be wrong with a run as its driver sees it: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import Problem, RecordError, SilentError, SpecError, StorageError

WEBHOOK = Problem(
    "notify.webhook",
    SpecError,
    "webhook: got {got!r}, wanted an address that begins with http:// or https://",
    cause="a wrong `--webhook`",
    advice="the whole address",
)

DOUBTFUL = Problem(
    "run.doubtful",
    RecordError,
    "run {run} is marked as finished, but {got}",
    "look at it with `lockstep record check {run}`, and do not trust what it says",
    cause="a record that does not bear out the end that it has: it was changed, damaged or copied in part",
    advice="`lockstep record check RUN`",
)

UNSAVED = Problem(
    "run.unsaved",
    StorageError,
    "{got}; the run trained to its end, and its record and weights are in {folder!r}",
    "remove the cause, and `lockstep resume {run}` takes the steps since its newest checkpoint again and saves it",
    shown="the checkpoint of step … could not be saved: …; the run trained to its end, …; …",
    cause="the last save of a run failed. The run is `FAILED`; its record and weights are whole",
    advice="remove the cause, then `lockstep resume RUN_ID`",
)

# --- a run in one process that hangs ----------------------------------------------------------------------------

NO_PROGRESS = Problem(
    "run.no_progress",
    SilentError,
    "it made no progress for {seconds} s, so it was ended",
    "what each of its threads was doing is in its stacks.txt (faults.longest_silence_s is the shortest time for that)",
    cause="with `--local`, or in one process of a notebook: the job, its data or a peer of torchrun hangs",
    advice="the record's `stacks.txt`",
)

NO_FIRST_STEP = Problem(
    "run.no_first_step",
    SilentError,
    "no first step within {seconds} s (faults.longest_start_s), so it was ended",
    "what each of its threads was doing is in its stacks.txt",
    cause="the same before the first step: the job's import or its data hang, or take longer",
    advice="the record's `stacks.txt`; a larger `faults.longest_start_s` if the data take that long",
)
