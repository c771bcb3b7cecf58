"""What can be wrong with a record: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import Problem, RecordError

RUN_JSON = Problem(
    "record.run_json",
    RecordError,
    "run {run}: its run.json in {folder!r} {got}",
    "`lockstep record check {run} --repair` writes it again",
    cause="the file that describes a run without MLflow was deleted or damaged",
    advice="what the message says",
)
