"""What a run leaves at its end: its files of weights, its final model, and its summary."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.job.interface import overrides
from lockstep.periodic import periodically
from lockstep.record.events.union import Alive
from lockstep.spec.locations import RECORD_OFF
from lockstep.training.auxiliary_state import beside_weights, put_beside, save_beside
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.clock import Clock
from lockstep.training.elastic.recovery import Seat
from lockstep.training.failure import job_at
from lockstep.training.final_model import keep_final_model
from lockstep.training.integrity.digests import check_same_weights, digest_on_first, gathered_on_first
from lockstep.training.integrity.state_digest import tree_digest, weights_digest
from lockstep.training.run import Run
from lockstep.training.state import TrainState, tensors
from lockstep.training.step.shards import Shard
from lockstep.training.weights import save_streamed, save_weights

ALIVE_S = 1.0
"""Seconds between signs of life while a run makes its final model, which may be large."""


def kept(run: Run, seat: Seat, *, stopped: bool) -> list[Path]:
    """On rank 0, write the results of the run into its folder. Returns their paths; no path where the attempt saves nothing.

    These are the weights of the last step, their average and the best ones, where there are any, and what is beside them. A run that was not stopped also gets the
    final model, of the average where there is one: those weights were evaluated. A stopped run has no time for it.
    """
    folder = None if run.group.rank > 0 else kept_in(run, seat)
    if run.state.sharding is not None:
        folder = run.group.broadcast_object(folder, 0)  # the others send their rows
    if folder is None or seat.origin is None:
        return []
    best = run.state.best.weights
    files = save_whole(run, folder, "final", tensors(run.state))
    alone = run.state.sharding is None  # the ranks have compared these weights for the summary
    if run.state.has_average:
        with run.state.averaged(alone=alone):
            files += save_whole(run, folder, "ema", tensors(run.state))
    files += [] if best is None else save_whole(run, folder, "best", best)
    final = final_model_of(run) if seat.origin.saves and not stopped else run.state.model
    if run.group.rank > 0:
        return []
    of_weights = {path.stem: path for path in files}
    files += [save_beside(of_weights[name], tree) for name, tree in _beside(run.state).items() if tree]
    if not seat.origin.saves:
        return []
    if not stopped and run.spec.record.uri != RECORD_OFF:
        with (
            periodically(lambda: lambda: seat.tell(Alive()), ALIVE_S, "lockstep-final-model"),
            run.state.averaged(alone=True),
        ):
            files += keep_final_model(run.job, final, folder)
    return files


def whole_weights(run: Run, weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """`weights` with whole tensors in the places of shards, in host memory, on rank 0; the other ranks, which call it too, get what is not sharded."""
    gathered: dict[int, Tensor | None] = {}
    for value in weights.values():
        if isinstance(value, Shard) and id(value) not in gathered:
            whole = value.gathered(run.group, 0)
            gathered[id(value)] = whole if whole is None else whole.cpu()
    every = {name: gathered.get(id(value), value) for name, value in weights.items()}
    return {name: value for name, value in every.items() if isinstance(value, Tensor)}


def save_whole(run: Run, folder: Path, name: str, weights: Mapping[str, Any]) -> list[Path]:
    """Write weights on rank 0, which has one whole tensor of a sharded model after another. All its ranks call it."""
    if run.state.sharding is None:
        return save_weights(folder, {name: whole_weights(run, weights)})
    shapes = {
        key: value.meta() if isinstance(value, Shard) else value.to("meta")
        for key, value in weights.items()
        if isinstance(value, Tensor | Shard)
    }
    path = folder / "weights" / f"{name}.safetensors" if run.group.rank == 0 else None
    return save_streamed(path, shapes, lambda key: gathered_on_first(run.group, weights[key]))


def final_model_of(run: Run) -> nn.Module:
    """The run's model with its final weights, or their average; of a sharded one a second model, which rank 0 has whole. All ranks call it."""
    state = run.state
    if state.sharding is None or not overrides(run.job, "example_input"):
        return state.model
    with state.averaged():
        weights = whole_weights(run, tensors(state))
    if run.group.rank > 0:
        return state.model
    beside = beside_weights(state.model, run.job, state.settings.changed)
    with job_at("while its model was made for the final model"):
        model = run.job.model()
    with torch.no_grad():
        put_beside(model, run.job, weights, {kind: tree for kind, tree in beside.items() if kind != "job"})
    return model


def kept_in(run: Run, seat: Seat) -> Path | None:
    """The folder of the results; None for an attempt that leaves none. Steps that are taken again may be asked for theirs."""
    if seat.origin is None:
        return None
    if seat.origin.saves:
        return run.spec.folder / seat.requests.run_id()
    folder = seat.origin.replay.weights if seat.origin.replay is not None else None
    return None if folder is None else Path(folder)


def _beside(state: TrainState) -> dict[str, dict[str, Any]]:
    """What is beside the final weights and the best ones, by the names of their files, where that is known."""
    best = {} if state.best.beside is None else {"best": state.best.beside}
    return {"final": beside_weights(state.model, state.job, state.settings.changed), **best}


def peak_memory(device: torch.device) -> int:
    """The most memory in bytes that this rank has held: what torch has allocated on a GPU, else the process's resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def summarise(run: Run, clock: Clock, checkpoints: Checkpoints, *, stopped: bool) -> dict[str, Any]:
    """The summary of the run. Raises DriftError where the ranks' weights are not the same bits."""
    state = run.state
    digest = _common_digest(run, "weights")
    ema_digest = None
    if state.has_average:
        with state.averaged():
            ema_digest = _common_digest(run, "averages of the weights")
    best = state.best.weights
    return {
        "identity": run.facts["identity"],
        "step": state.counters.step,
        "epoch": state.epoch(run.plan),
        "samples": state.counters.samples,
        "skipped": state.counters.skipped,
        "stopped": stopped,
        "workers": run.group.size,
        "metrics": dict(state.metrics),
        "weights_digest": digest,
        "ema_digest": ema_digest,
        "best_digest": _digest(run, best) if best is not None else None,
        "best_step": state.best.step if best is not None else None,
        "beside": {name: tree_digest(tree) if tree else None for name, tree in _beside(state).items()},
        "checkpoint": checkpoints.newest,
        "unsaved": checkpoints.unsaved,
        **clock.figures(),
    }


def _digest(run: Run, weights: Mapping[str, Any]) -> str:
    """The digest of weights; of sharded ones rank 0 computes it, with one whole tensor after another."""
    return digest_on_first(run.group, weights) if run.state.sharding is not None else weights_digest(weights)


def _common_digest(run: Run, what: str) -> str:
    """The digest of the current weights. DriftError where the ranks have different ones."""
    if run.state.sharding is not None:
        return _digest(run, tensors(run.state))
    digests = run.group.gather(_digest(run, tensors(run.state)))
    if len(set(digests)) > 1:
        strays = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        check_same_weights(run.group, run.state.model, run.state.counters.step, strays, what)
    return str(digests[0])
