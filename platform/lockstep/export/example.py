"""The inputs with which a model is traced and compared: a job's example, whose rows are taken in any number and order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.export import problems
from lockstep.export.artifact import BATCH, Value, dtype_name
from lockstep.job.interface import Job
from lockstep.training.failure import as_lockstep_error

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """Arguments of a model by the names of its parameters. Those of `has_rows` have a row for each sample."""

    names: tuple[str, ...]
    tensors: Inputs
    has_rows: tuple[bool, ...]

    @property
    def rows(self) -> int:
        """How many samples there are."""
        return len(self.tensors[self.has_rows.index(True)])

    def take(self, rows: Sequence[int]) -> Inputs:
        """These rows of each argument that has rows, and the others whole."""
        index = torch.tensor(rows)
        pairs = zip(self.tensors, self.has_rows, strict=True)
        return tuple(tensor[index] if has_rows else tensor for tensor, has_rows in pairs)

    def values(self, fixed_batch: int | None) -> tuple[Value, ...]:
        """How the arguments are described beside an artifact."""
        return tuple(
            Value(
                name=name,
                dtype=dtype_name(tensor.dtype),
                shape=(BATCH, *tensor.shape[1:]) if fixed_batch is None and has_rows else tuple(tensor.shape),
            )
            for name, tensor, has_rows in zip(self.names, self.tensors, self.has_rows, strict=True)
        )


def example_of(job: Job, model: nn.Module) -> Example | None:
    """The job's example input as arguments of `model`; None where the job gives none. JobError for one that is none.

    The first argument has rows, and so have others that are as long.
    """
    try:
        example = job.example_input()
    except (Exception, SystemExit) as error:  # the job's own code
        raise as_lockstep_error(error, "in example_input") from error
    if example is None:
        return None
    tensors = example if isinstance(example, tuple) else (example,)
    for argument in tensors:
        if not isinstance(argument, Tensor):
            raise problems.EXAMPLE_KIND(got=type(argument).__name__)
    if not tensors or not tensors[0].dim() or not len(tensors[0]):
        raise problems.EXAMPLE_ROWS(
            got=f"of shape {tuple(tensors[0].shape)}" if tensors else "that is not there"
        )
    parameters = inspect.signature(model.forward).parameters.values()
    named = [
        argument.name
        for argument in parameters
        if argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    names = [*named, *(f"input_{i}" for i in range(len(named), len(tensors)))][: len(tensors)]
    has_rows = tuple(argument.dim() > 0 and len(argument) == len(tensors[0]) for argument in tensors)
    return Example(tuple(names), tuple(argument.detach().contiguous() for argument in tensors), has_rows)


def slices(rows: int, size: int, *, padded: bool) -> Iterator[list[int]]:
    """The rows in batches of `size`. The last one is shorter, or `padded` with its last row again."""
    for start in range(0, rows, size):
        batch = list(range(start, min(start + size, rows)))
        yield batch + [batch[-1]] * (size - len(batch) if padded else 0)
