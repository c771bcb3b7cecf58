"""The spare process: a new interpreter that resumes a run from a checkpoint, takes one step alone, and ends.

It is no fork of the trainer: it must have none of its memory, as a process after an outage has none, and CUDA survives no fork. It has the least
priority, and ends with its parent. It records nothing, saves nothing, and imports no Ray.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


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


def make_way(parent: int) -> None:
    """Give up this process's priority, be the first that ends where memory is short, and end with `parent`."""
    from lockstep.process import end_with_parent

    end_with_parent(parent)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    # A session of its own may be a group of its own for the scheduler, in which the priority of its one process means nothing.
    for name, value in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with suppress(OSError):  # not on every system
            Path("/proc/self", name).write_text(value)
