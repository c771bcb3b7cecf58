"""The model as a run begins with it: the job's, with its initial weights, whole or without memory until it is sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from lockstep.communication.group import Group
from lockstep.job.inputs.imports import imports_of_job
from lockstep.job.interface import Job, overrides
from lockstep.randomness import model_key, seed_all
from lockstep.spec.fields import Spec
from lockstep.training import problems
from lockstep.training.deferred_model import DeferredModel, NotDeferredError
from lockstep.training.failure import as_lockstep_error
from lockstep.training.integrity.rehearsal.child_process import can_fork
from lockstep.training.integrity.rehearsal.micro_batch import check_model
from lockstep.training.modes import enter_training
from lockstep.training.step.activations import checkpoint_activations
from lockstep.training.step.parameters import check_scaled
from lockstep.training.weights import load_weights


def make_model(spec: Spec, job: Job, device: torch.device, group: Group | None = None) -> nn.Module:
    """The job's model on its device, made from the seeded generators, with the initial weights that the spec names.

    All ranks of a `group` call it, since rank 0 reads the weights for all. A job may draw its weights on the device.
    """
    seed_all(model_key(spec.seed), device)
    try:
        with imports_of_job(job):
            model = job.model()
    except (Exception, SystemExit) as error:  # a job may call sys.exit()
        raise as_lockstep_error(error, "while its model was made") from error
    if not isinstance(model, nn.Module):
        raise problems.MODEL_KIND(got=type(model).__name__)
    _check(spec, model)
    if spec.initial_weights is not None:
        load_weights(model, Path(spec.initial_weights), group)
    if spec.activation_checkpointing:
        checkpoint_activations(job, model)
    model.to(device)
    enter_training(model)
    return model


def _check(spec: Spec, model: nn.Module) -> None:
    check_model(model)
    if spec.precision == "fp16":
        check_scaled(model)


def asks_for_shards(spec: Spec) -> bool:
    """Whether a fully sharded run begins by shards, if its model can: without a rehearsal in other processes, which have the whole model."""
    return spec.rehearsal == "off" and spec.initial_weights is None


def make_deferred(spec: Spec, job: Job, group: Group, warn: Callable[[str], None]) -> DeferredModel | None:
    """The job's model without memory for its parameters, from the same generators; None where the model has to begin whole. All ranks call it."""
    if spec.rehearsal != "off":
        return None
    deferred, why = None, ""
    if not asks_for_shards(spec):
        why = "initial_weights are loaded into a whole model"
    elif overrides(job, "batch_loss"):
        why = "a loss over the whole batch is tried with several micro-batches"
    elif not can_fork(group.device):
        why = "no other process can find out the units on this device"
    else:
        seed_all(model_key(spec.seed), group.device)
        try:
            with imports_of_job(job):
                deferred = DeferredModel(job.model)
            _check(spec, deferred.model)
            if spec.activation_checkpointing:
                checkpoint_activations(job, deferred.model)
            enter_training(deferred.model)
        except NotDeferredError as reason:
            deferred, why = None, str(reason)
    reasons = [reason for reason in group.gather(why) if reason]
    if reasons:
        warn(f"sharding: every worker begins with the whole model: {reasons[0]}")
        return None
    return deferred
