"""What the evaluating process does: it builds the run, and answers what its trainer asks until that has no more to ask."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from lockstep.communication.group import Group
from lockstep.job.inputs.variables import reads_of, variables_noted
from lockstep.job.loading import load_job
from lockstep.record.events.union import tell_nobody
from lockstep.spec.loading import validate
from lockstep.training import problems
from lockstep.training.elastic.recovery import other_fields
from lockstep.training.evaluation.evaluator_messages import Asked, AtWork, Beginning, Failed, Measured
from lockstep.training.failure import as_lockstep_error
from lockstep.training.integrity.resume_check.resumed_step import alone
from lockstep.training.loop import surroundings
from lockstep.training.run import Run
from lockstep.training.setup import prepare
from lockstep.training.step.buffers import KeptBuffers
from lockstep.training.swapped_weights import put_weights

ALIVE_S = 1.0
"""Seconds between two signs of life."""


def serve(trainer: Connection, weights: int) -> None:
    """Evaluate what the file with the descriptor `weights` holds whenever the trainer asks, until that closes its end."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            _serve(trainer, weights)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the trainer decides what it means: it evaluates by itself
            trainer.send(Failed(str(as_lockstep_error(error, "in the process that evaluates"))))


def _serve(trainer: Connection, weights: int) -> None:
    beginning: Beginning = trainer.recv()
    given, device = validate(beginning.spec), torch.device(beginning.device)
    # Only placement is changed, so no bit depends on it. Its loader processes fetch as those of a worker would.
    spec = alone(given).model_copy(update={"data": given.data})
    if device.type == "cuda":
        torch.cuda.set_device(device)
    job = load_job(spec.job.use, spec.job.params)
    with surroundings(spec), variables_noted(reads_of(job)):
        group = Group(0, 1, device)
        run = prepare(spec, job, group, tell_nobody, joining_worker=True, versions=beginning.table_versions)
        # How many workers train is placement here: an evaluation has the same bits on any number of them.
        fields = {**beginning.fields, **({"workers": 1} if "workers" in beginning.fields else {})}
        if others := other_fields(run, fields):
            raise problems.OTHER_EVALUATOR(got=others[0])
        trainer.send(AtWork())
        while True:
            trainer.send(evaluated(run, trainer.recv(), weights, _signs_of_life(trainer)))


def evaluated(run: Run, asked: Asked, weights: int, alive: Callable[[], None]) -> Measured:
    """The metrics of the weights in the file."""
    assert run.evaluate is not None
    os.lseek(weights, 0, os.SEEK_SET)
    with os.fdopen(
        os.dup(weights), "rb"
    ) as file:  # not one file for all: it would hold on to what it has read
        # Written by the trainer of this very run, into memory that nobody else has open.
        tensors, beside = torch.load(file, weights_only=False)
    put_weights(run.state, tensors, beside)
    del tensors
    began = time.perf_counter()
    run.evaluate.restore_buffers_by(KeptBuffers(run.state.model).restore)
    metrics = run.evaluate(run.state.model, asked.labels, alive)
    return Measured(metrics, dict(run.evaluate.figures), time.perf_counter() - began, time.time())


def _signs_of_life(trainer: Connection) -> Callable[[], None]:
    told_at = 0.0

    def alive() -> None:
        nonlocal told_at
        if time.monotonic() > told_at + ALIVE_S:
            told_at = time.monotonic()
            trainer.send(AtWork())

    return alive
