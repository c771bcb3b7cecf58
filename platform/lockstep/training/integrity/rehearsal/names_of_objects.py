"""What a job and everything around it hold, under the names that messages use."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from lockstep.job.interface import Job
from lockstep.training.integrity.rehearsal.object_state import LARGEST, Memory


def memory_of(
    job: Job,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    largest: int = LARGEST,
    datasets: bool = False,
) -> Memory:
    """What a job, its module, its model and the hooks of its optimizers hold; `largest` and `datasets` as in `Memory`."""
    kinds = [kind for kind in type(job).__mro__ if kind not in {Job, object}]
    module = sys.modules.get(type(job).__module__)
    hooks = [vars(optimizer).get(name) for optimizer in optimizers for name in HOOKS]
    roots = {
        "model": model,
        "job": job,
        "optimizer hook": hooks,
        **{f"class {kind.__name__}": kind for kind in kinds},
        **({f"module {type(job).__module__}": module} if module is not None else {}),
    }
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    excluded = [*parameters, *model.parameters(), *model.buffers(), *optimizers]
    return Memory(roots, apart=excluded, watched=model.modules(), largest=largest, datasets=datasets)


HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def named(places: Sequence[str]) -> str:
    """The first of some places, and the number of the others, for a message."""
    return places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")
