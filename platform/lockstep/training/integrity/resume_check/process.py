"""The spare process: it resumes a run from a checkpoint, takes one step alone, and ends. It records nothing, saves nothing, and imports no Ray."""

from __future__ import annotations

import os
import sys

from lockstep.training.spare_process import make_way


def main(request: int, answer: int, parent: int) -> None:
    """Answer the request in the file of descriptor `request` into that of `answer`. `parent` is the process that has started this one."""
    make_way(parent)
    import pickle  # only now: imports are most of what it computes

    from lockstep.training.integrity.resume_check.resumed_step import answered

    with os.fdopen(request, "rb") as asked:
        wanted = pickle.load(asked)
    content = pickle.dumps(answered(wanted))
    with os.fdopen(answer, "wb") as file:
        file.write(content)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever the job has left running is of no more use
