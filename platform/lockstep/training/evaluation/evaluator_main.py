"""The process that evaluates beside a trainer: it builds the run as a worker that joins does, and evaluates the weights that it is given, one set after another.

It records nothing, saves nothing, and imports no Ray.
"""

from __future__ import annotations

from lockstep.training.spare_process import make_way


def main(asked: int, weights: int, parent: int) -> None:
    """Serve the trainer, process `parent`, at the socket with descriptor `asked`; `weights` is the file in which it puts what is to be evaluated."""
    make_way(parent)
    import os  # only now: imports are most of what a start takes
    import sys
    from multiprocessing.connection import Connection

    from lockstep.training.evaluation.serving import serve

    with Connection(asked) as trainer:
        serve(trainer, weights)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever the job has left running is of no more use
