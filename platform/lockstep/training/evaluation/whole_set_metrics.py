"""Metrics of the whole evaluation set: outputs of all micro-batches in their order, and the job's functions over them.

The result does not depend on which worker computed an output: outputs are joined in micro-batch order on rank 0, which alone
calls the functions and gives all ranks what they return.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.data.contents import leaves
from lockstep.data.loader import map_tensors
from lockstep.job.interface import Job, overrides
from lockstep.randomness import seed_all, whole_set_key
from lockstep.training import problems
from lockstep.training.failure import job_at
from lockstep.training.step.means import as_float, check_name

Outputs = Mapping[str, Tensor | list[Any]]
"""By name: a tensor with a row for each sample (or token, or box), or a list of whatever pickle takes."""

LONGEST_FIGURE = 4 << 20
"""The most characters of one figure, which is kept in the journal and sent to the store."""


class WholeSet(NamedTuple):
    """A job's metrics by name over all outputs, and its figures as text by file name."""

    metrics: Mapping[str, float]
    figures: Mapping[str, str]
    objects: Sequence[Any] = ()
    """The metric objects with `update`, `compute` and `reset`; they are reset."""


def has_outputs(job: Job) -> bool:
    """Whether the job has an `outputs` method of its own."""
    return overrides(job, "outputs")


def taken(given: object) -> Outputs:
    """The outputs of one micro-batch, on the CPU and in memory of their own. Raises JobError for what cannot be joined."""
    if not isinstance(given, Mapping):
        raise problems.OUTPUTS_FORM(
            got=f"returned {type(given).__name__}",
            wanted="tensors or lists by name, with a row for each sample",
        )
    outputs: dict[str, Tensor | list[Any]] = {}
    for name, value in given.items():
        if isinstance(value, list) or (isinstance(value, Tensor) and value.dim()):
            outputs[name] = map_tensors(value, _own, copy.deepcopy)
        else:
            got = "a tensor of no dimension" if isinstance(value, Tensor) else type(value).__name__
            raise problems.OUTPUTS_FORM(
                got=f"{name!r} is {got}", wanted="a tensor or a list with a row for each sample"
            )
    return outputs


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def texts(outputs: Outputs) -> dict[str, str]:
    """Each output as a text: equal outputs have equal texts."""
    return {name: repr(list(leaves(value, opaque=True))) for name, value in outputs.items()}


def joined(parts: Sequence[Outputs]) -> Outputs:
    """The outputs of several micro-batches joined. Raises JobError where they do not fit together."""
    if not parts:
        return {}
    for outputs in parts[1:]:
        if outputs.keys() != parts[0].keys():
            odd = sorted(outputs.keys() ^ parts[0].keys())
            raise problems.OUTPUTS_FORM(
                got=f"{odd[0]!r} is given for some micro-batches only", wanted="the same names for all"
            )
    return {name: _joined(name, [part[name] for part in parts]) for name in parts[0]}


def _joined(name: str, values: list[Any]) -> Tensor | list[Any]:
    kinds = {_kind(value): value for value in values}
    if len(kinds) > 1:
        raise problems.OUTPUTS_FORM(
            got=f"{name!r} is {' in one micro-batch and '.join(list(kinds)[:2])} in another",
            wanted="one type and one shape of a row",
        )
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return [row for value in values for row in value]


def _kind(value: Tensor | list[Any]) -> str:
    return f"{value.dtype} with rows of {tuple(value.shape[1:])}" if isinstance(value, Tensor) else "a list"


def compute(job: Job, outputs: Outputs, *, seed: int) -> WholeSet:
    """The job's metrics and figures over all outputs, with generators seeded from (seed, "eval set"). Raises LockstepError."""
    results = {}
    for name, function in (("whole_set_metrics", job.whole_set_metrics), ("figures", job.figures)):
        seed_all(whole_set_key(seed))
        returned = _called(name, function, outputs)
        if not isinstance(returned, Mapping):
            raise problems.WHOLE_SET_KIND(name=name, got=type(returned).__name__)
        results[name] = returned
    metrics: dict[str, float] = {}
    for name, value in results["whole_set_metrics"].items():
        for key, number in _numbers(str(name), value, outputs):
            check_name("job.whole_set_metrics", key)
            if key in metrics:
                raise problems.WHOLE_SET_NAME(got=key, taken="given twice")
            metrics[key] = number
    figures = dict(_figure(str(name), value) for name, value in results["figures"].items())
    objects = list(_objects(results["whole_set_metrics"]))
    for name, metric in objects:
        # As before the next evaluation: nothing is kept until then.
        _called(f"{name}.reset", metric.reset)
    return WholeSet(metrics, figures, [metric for _, metric in objects])


def _called(name: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    with job_at(f"evaluation, in {name}"), torch.no_grad():
        return function(*given, **named)


# --- metrics --------------------------------------------------------------------------------------------------


def _numbers(name: str, value: Any, outputs: Outputs) -> Iterator[tuple[str, float]]:
    """A metric as numbers by name: one, or one for each element, key or class."""
    if _is_metric(value):
        yield from _numbers(name, _computed(name, value, outputs), outputs)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{name}/{key}", inner, outputs)
    elif isinstance(value, Tensor | np.ndarray | list | tuple) and np.ndim(value) == 1:
        for i, inner in enumerate(value):
            yield from _numbers(f"{name}/{i}", inner, outputs)
    elif np.ndim(value) == 0 and hasattr(value, "__float__"):
        yield name, as_float(f"job.whole_set_metrics: {name!r}", value)
    else:
        got = f"of {np.ndim(value)} dimensions" if np.ndim(value) > 1 else type(value).__name__
        raise problems.WHOLE_SET_NUMBER(name=name, got=got)


def _is_metric(value: Any) -> bool:
    """Whether it is an object with `update` and `compute`, as torchmetrics has them."""
    return callable(getattr(value, "update", None)) and callable(getattr(value, "compute", None))


def _objects(given: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The objects with `update`, `compute` and `reset` among the metrics that a job gives, by their names."""
    for name, value in given.items():
        if _is_metric(value) and callable(getattr(value, "reset", None)):
            yield str(name), value
        elif isinstance(value, Mapping):
            yield from _objects(value)


def _computed(name: str, metric: Any, outputs: Outputs) -> Any:
    """The result of a metric object, as in torchmetrics, for the outputs that the parameters of its `update` name."""
    taken_by_name = inspect.signature(metric.update).parameters
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken_by_name.values())
    arguments = {key: value for key, value in outputs.items() if every or key in taken_by_name}
    if callable(getattr(metric, "reset", None)):
        _called(f"{name}.reset", metric.reset)
    _called(f"{name}.update", metric.update, **arguments)
    return _called(f"{name}.compute", metric.compute)


# --- figures --------------------------------------------------------------------------------------------------


def _figure(name: str, value: Any) -> tuple[str, str]:
    """A figure's file name and text: text as it is, a table as CSV, a matplotlib figure as SVG."""
    if PurePosixPath(name).name != name or not name.isprintable():
        raise problems.FIGURE(got=f"got the name {name!r}", wanted="the name of a file without folders")
    if isinstance(value, str):
        suffix, text = ".txt", value
    elif callable(getattr(value, "savefig", None)):
        suffix, text = ".svg", _drawn(value)
    elif isinstance(value, Tensor | np.ndarray | list | tuple) and np.ndim(value) in (1, 2):
        suffix, text = ".csv", _table(value)
    else:
        raise problems.FIGURE(
            got=f"{name!r} is {type(value).__name__}",
            wanted="text, a figure of matplotlib, or numbers in rows and columns",
        )
    if len(text) > LONGEST_FIGURE:
        raise problems.FIGURE(
            got=f"{name!r} has {len(text)} characters", wanted=f"at most {LONGEST_FIGURE}: draw fewer points"
        )
    return name if "." in name else name + suffix, text


def _drawn(figure: Any) -> str:
    """A figure as SVG, the same text for the same figure: its ids come from a fixed salt, and it has no date."""
    import matplotlib as mpl
    from matplotlib import pyplot

    with mpl.rc_context({"svg.hashsalt": "lockstep"}):
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    pyplot.close(figure)  # pyplot keeps every figure until it is closed
    return file.getvalue()


def _table(value: Any) -> str:
    numbers = np.atleast_2d(np.asarray(value.tolist() if isinstance(value, Tensor) else value))
    return "".join(",".join(map(str, row)) + "\n" for row in numbers.tolist())


def check_names(metrics: Mapping[str, float], taken_names: Mapping[str, object]) -> None:
    """JobError for a metric with a name that is taken."""
    for name in metrics:
        if name in taken_names:
            raise problems.WHOLE_SET_NAME(
                got=name, taken="the name of the loss, of one of its parts or of a metric"
            )
