"""What a job's class says about itself before it is used: methods that are missing, and methods that nothing calls.

Users of other trainers bring the names that they know. A method of such a name would do nothing here, without a word.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from lockstep.job import problems
from lockstep.job.interface import Job

NEEDED = ("model", "train_data", "loss")

_LOSS = "write loss(model, batch), which returns lockstep.Loss(total, weight) for one micro-batch"
_METRICS = (
    "write metrics(model, batch), which returns lockstep.Mean values by name for one micro-batch of eval_data, or "
    "outputs(model, batch) and whole_set_metrics(outputs) for what only the whole set shows"
)
_MODEL = "the model is the nn.Module that model() returns; loss(model, batch) calls it"
_OPTIMIZER = (
    "set optimizer and schedule in the spec, or write optimizer(model) and schedule(optimizer, updates)"
)
_SCHEDULE = "set schedule in the spec, or write schedule(optimizer, updates)"
_TRAIN = "write train_data(), which returns a map-style dataset; batch.global and data.* in the spec say how it is read"
_EVAL = "write eval_data(), which returns a map-style dataset"
_ORDER = "set data.shuffle in the spec, for Lockstep orders the data"
_LOOP = "Lockstep holds the loop: write loss(model, batch)"
_NO_HOOK = "Lockstep calls no such hook: write what it should do into model, loss or metrics, or into after_step(model, step)"
_AFTER = "write after_step(model, step), which follows each update"

MEANT = {
    **dict.fromkeys(("training_step", "train_step", "compute_loss", "loss_fn", "get_loss", "criterion"), _LOSS),
    **dict.fromkeys(("validation_step", "val_step", "eval_step", "evaluation_step", "test_step"), _METRICS),
    **dict.fromkeys(("metric", "compute_metrics", "get_metrics", "eval_metrics", "evaluate", "validate"), _METRICS),
    **dict.fromkeys(("forward", "__call__", "build_model", "get_model", "configure_model", "create_model",
        "make_model", "model_init"), _MODEL),
    **dict.fromkeys(("configure_optimizers", "configure_optimizer", "create_optimizer", "optimizers", "get_optimizer",
        "optimizer_step"), _OPTIMIZER),
    **dict.fromkeys(("scheduler", "lr_scheduler", "create_scheduler", "get_scheduler", "lr_scheduler_step"), _SCHEDULE),
    **dict.fromkeys(("collate_fn", "data_collator", "collate_batch"), "write collate(samples), which makes a micro-batch"),
    **dict.fromkeys(("train_dataloader", "dataloader", "dataloaders", "get_train_dataloader", "train_loader", "dataset",
        "train_dataset", "training_data", "get_dataset", "setup", "prepare_data"), _TRAIN),
    **dict.fromkeys(("val_dataloader", "eval_dataloader", "val_loader", "get_eval_dataloader", "val_data",
        "valid_data", "validation_data", "eval_dataset", "val_dataset"), _EVAL),
    **dict.fromkeys(("test_dataset", "test_dataloader", "get_test_dataloader"), "write test_data(), which returns a map-style dataset"),
    **dict.fromkeys(("sampler", "train_sampler", "batch_sampler", "get_train_sampler"), _ORDER),
    **dict.fromkeys(("train", "fit", "train_epoch", "training_loop", "backward"), _LOOP),
    **dict.fromkeys(("on_train_start", "on_train_end", "on_epoch_end", "on_epoch_start", "on_train_epoch_start",
        "on_train_epoch_end", "on_validation_epoch_end", "on_train_batch_start", "on_before_optimizer_step",
        "training_epoch_end", "validation_epoch_end"), _NO_HOOK),
    **dict.fromkeys(("on_train_batch_end", "on_step_end", "on_before_zero_grad", "after_update", "post_step", "update_ema",
        "update_teacher", "update_target"), _AFTER),
}  # fmt: skip
"""Methods of other trainers, and what is meant by them here."""

_CALLS = {
    "model": (), "train_data": (), "eval_data": (), "loss": ("model", "batch"), "metrics": ("model", "batch"),
    "outputs": ("model", "batch"), "whole_set_metrics": ("outputs",), "figures": ("outputs",),
    "collate": ("samples",), "optimizer": ("model",), "schedule": ("optimizer", "updates"), "after_step": ("model", "step"), "state_dict": (), "load_state_dict": ("state",), "example_input": (), "identity": (), "save_pretrained": ("model", "folder"), "load_pretrained": ("model", "folder"),
    "activation_checkpoints": ("model",), "conditional_parameters": ("model",), "__init__": ("params",),
    "phases": (), "frozen_parameters": ("model", "step"),
    "embed": ("model", "batch"), "batch_loss": ("model", "rows"), "term_weights": ("batch",),
    "step_statistics": ("model", "batch"), "test_data": (), "eval_weights": ("model", "optimizer"),
}  # fmt: skip
"""How each method of a job is called."""


def check_methods(job_class: type[Job], use: str) -> None:
    """Refuse a class that lacks what every job has, or has what nothing would call. Raises JobImportError."""
    methods = _own_methods(job_class)
    _check_unused(job_class, use, methods)
    phased = "phases" in methods
    _check_batch_loss(use, methods)
    without_loss = phased or "batch_loss" in methods
    missing = [
        name
        for name in NEEDED
        if getattr(job_class, name) is getattr(Job, name) and not (name == "loss" and without_loss)
    ]
    if missing:
        raise problems.METHOD_MISSING(got=use, method=missing[0])
    if phased and "optimizer" in methods:
        raise problems.OPTIMIZER_BESIDE_PHASES(got=use)
    _check_outputs(use, methods)
    _check_statistics(job_class, use, methods)
    for name, names in _CALLS.items():
        if name in methods and (name != "embed" or "batch_loss" in methods):
            _check_call(job_class, use, name, names)


def _check_batch_loss(use: str, methods: dict[str, Any]) -> None:
    """A loss over the rows of a whole batch needs rows, and does not go beside phases. An `embed` alone is a method of the job's own."""
    if "batch_loss" in methods and "embed" not in methods:
        raise problems.NO_EMBED(got=use)
    if "batch_loss" in methods and "phases" in methods:
        raise problems.BATCH_LOSS_BESIDE_PHASES(got=use)


def _check_statistics(job_class: type[Job], use: str, methods: dict[str, Any]) -> None:
    """Statistics of a step need an `after_step` that takes them."""
    if (
        "step_statistics" in methods
        and "statistics" not in inspect.signature(job_class.after_step).parameters
    ):
        raise problems.STATISTICS_UNUSED(got=use)


def _check_outputs(use: str, methods: dict[str, Any]) -> None:
    """What is made of the outputs and the outputs themselves need each other."""
    consumers = [name for name in ("whole_set_metrics", "figures") if name in methods]
    if consumers and "outputs" not in methods:
        raise problems.NO_OUTPUTS(got=use, method=consumers[0])
    if "outputs" in methods and not consumers:
        raise problems.OUTPUTS_UNUSED(got=use)


def _own_methods(job_class: type[Job]) -> dict[str, Any]:
    """The functions of the job's class and of its bases that are the user's, by name.

    `optimizer = Job.optimizer` in a class takes back what its base has: the method is Lockstep's again.
    """
    methods: dict[str, Any] = {}
    for base in reversed(job_class.__mro__[: job_class.__mro__.index(Job)]):
        if not base.__module__.startswith(("lockstep.", "torch.")):
            methods |= {name: value for name, value in vars(base).items() if _function(value) is not None}
    return {name: value for name, value in methods.items() if value is not vars(Job).get(name)}


def _check_unused(job_class: type[Job], use: str, methods: dict[str, Any]) -> None:
    known_names = [name for name in _CALLS if not name.startswith("_")]
    used: set[str] | None = None
    for name in methods:
        meant = MEANT.get(name) or _misspelt(name, known_names, methods)
        if meant is None or name in vars(Job):
            continue
        used = set(_names_used(job_class)) if used is None else used
        if name not in used:
            raise problems.METHOD_UNUSED(got=use, method=name, hint=meant)


def _misspelt(name: str, known: list[str], methods: dict[str, Any]) -> str | None:
    """`did you mean` for a name that is nearly one of a job's methods, where the job does not have that one itself."""
    if name.startswith("_"):
        return None
    close = difflib.get_close_matches(name, [each for each in known if each not in methods], n=1, cutoff=0.85)
    return f"did you mean {close[0]}()? Rename it" if close else None


def _check_call(job_class: type[Job], use: str, name: str, names: tuple[str, ...]) -> None:
    """A method must be callable as Lockstep calls it."""
    method = inspect.getattr_static(job_class, name)
    bound = () if isinstance(method, staticmethod) else ("self",)
    function = _function(method)
    if name == "after_step" and "statistics" in inspect.signature(function).parameters:  # type: ignore[arg-type]
        names = (*names, "statistics")
    if name == "eval_weights" and "batches" in inspect.signature(function).parameters:  # type: ignore[arg-type]
        names = (*names, "batches")
    try:
        inspect.signature(function).bind(*bound, *names)  # type: ignore[arg-type]
    except TypeError as error:
        call = f"{name}({', '.join(names)})"
        raise problems.SIGNATURE(use=use, method=name, call=call, got=error) from error


def _function(value: Any) -> FunctionType | None:
    """The function in a method of any kind; None for what is no method."""
    inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return inner if isinstance(inner, FunctionType) else None


def _names_used(job_class: type[Job]) -> Iterator[str]:
    """Every name that the code of the job's classes and of their modules mentions."""
    for base in job_class.__mro__[: job_class.__mro__.index(Job)]:
        for home in (base, sys.modules.get(base.__module__)):
            for value in vars(home).values() if home is not None else ():
                for function in _functions_of(value):
                    if function.__module__ == base.__module__:
                        yield from _names_in(function.__code__)


def _functions_of(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, property):
        yield from (f for f in (value.fget, value.fset) if isinstance(f, FunctionType))
    elif (function := _function(value)) is not None:
        yield function


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
