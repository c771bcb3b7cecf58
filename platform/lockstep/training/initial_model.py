"""The model as a run begins with it: the job's, with its initial weights, whole or without memory until it is sharded."""

from __future__ import annotations

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
from lockstep.training.integrity.rehearsal.memory_layout import check_present
from lockstep.training.integrity.rehearsal.micro_batch import check_model
from lockstep.training.integrity.rehearsal.step_rehearsal import FULL_BYTES
from lockstep.training.module_modes import enter_training
from lockstep.training.step.activations import checkpoint_activations
from lockstep.training.step.parameters import check_scaled
from lockstep.training.step.sparse_gradients import declared_tables
from lockstep.training.stored_weights import completed, load_weights, stored_weights, why_not_by_rows


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
        load_weights(model, spec.initial_weights, group)
    if spec.activation_checkpointing:
        checkpoint_activations(job, model)
    check_present(model)
    model.to(device)
    enter_training(model)
    return model


def _check(spec: Spec, model: nn.Module) -> None:
    check_model(model)
    if spec.precision == "fp16":
        check_scaled(model)


def asks_for_shards(spec: Spec, size: int) -> bool:
    """Whether a fully sharded run begins by shards, if its model can, whose parameters take `size` bytes.

    A rehearsal in other processes has the whole model. `auto` leaves it out where the model is not small.
    """
    return spec.rehearsal == "off" or (spec.rehearsal == "auto" and size > FULL_BYTES)


def make_deferred(spec: Spec, job: Job, group: Group) -> DeferredModel | str:
    """The job's model without memory for its parameters, from the same generators; why not where the model has to begin whole. All ranks call it."""
    if spec.rehearsal not in ("off", "auto"):
        return f"rehearsal: {spec.rehearsal} has the whole model in other processes"
    deferred, why = None, ""
    if overrides(job, "batch_loss"):
        why = "a loss over the whole batch is tried with several micro-batches"
    elif not can_fork(group.device):
        why = "no other process can find out the units on this device"
    else:
        seed_all(model_key(spec.seed), group.device)
        try:
            with imports_of_job(job):
                deferred = DeferredModel(job.model)
            if table := min(declared_tables(deferred.model), default=None):
                raise NotDeferredError(f"parameter {table!r} has sparse gradients")
            if not asks_for_shards(spec, sum(parameter.nbytes for parameter in deferred.model.parameters())):
                why = "it is small, and the rehearsal has it whole in other processes"
            _check(spec, deferred.model)
            if spec.activation_checkpointing:
                checkpoint_activations(job, deferred.model)
            enter_training(deferred.model)
        except NotDeferredError as reason:
            deferred, why = None, str(reason)
    why = _agreed(group, why)
    if deferred is None or why:
        return why
    if spec.initial_weights is not None:
        weights = completed(deferred.model, stored_weights(spec.initial_weights, group))
        why = _agreed(group, why_not_by_rows(deferred.model, weights))
        if why:
            return why
        deferred.begin_with(weights)
    return deferred


def _agreed(group: Group, why: str) -> str:
    """The first reason of any rank; empty where none has one. All ranks call it."""
    return str(next((reason for reason in group.gather(why) if reason), ""))
