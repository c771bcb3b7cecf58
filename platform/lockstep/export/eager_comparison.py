"""Whether an artifact computes what eager mode computes: bit for bit, or within a tolerance that is stated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import ExportError
from lockstep.export import problems
from lockstep.export.artifact import Parity
from lockstep.export.formats import ExportFormat, Outputs
from lockstep.tensor_bytes import row_of


class Tolerance(NamedTuple):
    """`|found - expected| ≤ atol + rtol · |expected|`; none at all where both are 0."""

    rtol: float
    atol: float

    @staticmethod
    def of(form: ExportFormat, rtol: float | None) -> Tolerance:
        """That of a format where `rtol` is not given; `atol` is a tenth of it."""
        chosen = form.rtol if rtol is None else rtol
        return Tolerance(chosen, chosen / 10)


class _Difference(NamedTuple):
    elements: int
    differing: int
    beyond: int
    absolute: float
    relative: float


def compare(
    form: ExportFormat,
    sizes: Sequence[int],
    expected: Sequence[Outputs],
    computed: Sequence[Outputs],
    within: Tolerance,
) -> Parity:
    """Hold the outputs of an artifact against those of eager mode, batch by batch. ExportError where one is beyond the tolerance."""
    differences: list[_Difference] = []
    for size, references, outputs in zip(sizes, expected, computed, strict=True):
        if list(references) != list(outputs):
            names = {"wanted": ", ".join(references), "got": ", ".join(outputs)}
            raise problems.OTHER_OUTPUTS(format=form.name, **names)
        for name, reference in references.items():
            output = outputs[name]
            if (reference.shape, reference.dtype) != (output.shape, output.dtype):
                forms = {"wanted": _form(reference), "got": _form(output)}
                raise problems.OTHER_SHAPE(format=form.name, name=name, rows=size, **forms)
            differences.append(_difference(reference, output, within))
            if differences[-1].beyond:
                raise _different(form, name, size, differences[-1], within)
    return Parity(
        rtol=within.rtol,
        atol=within.atol,
        batch_sizes=tuple(sorted(set(sizes))),
        elements=sum(difference.elements for difference in differences),
        differing=sum(difference.differing for difference in differences),
        largest_difference=max((difference.absolute for difference in differences), default=0.0),
        largest_relative=max((difference.relative for difference in differences), default=0.0),
    )


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _different(
    form: ExportFormat, name: str, size: int, difference: _Difference, within: Tolerance
) -> ExportError:
    allowed = f"rtol {within.rtol:g} and atol {within.atol:g}" if within.rtol else "no difference"
    summary = f"{difference.differing} of {difference.elements} elements have other bits, by up to {difference.absolute:.3g}"
    return problems.DIFFERENT(
        format=form.name, name=name, rows=size, got=summary, wanted=allowed, advice=form.advice
    )


def _difference(expected: Tensor, computed: Tensor, within: Tolerance) -> _Difference:
    mask = _bits_differ(expected, computed)
    differing = int(mask.sum())
    if not differing:
        return _Difference(expected.numel(), 0, 0, 0.0, 0.0)
    # In float64, which holds every float32 and every difference of two.
    reference, actual = expected.flatten()[mask].double(), computed.flatten()[mask].double()
    distances = (actual - reference).abs()
    distances[reference == actual] = 0.0  # 0 and -0; two that are infinite
    distances[reference.isnan() & actual.isnan()] = 0.0
    distances = distances.nan_to_num(nan=torch.inf)  # NaN on one side alone
    allowed = within.atol + within.rtol * reference.abs()
    tolerant = within.rtol and expected.is_floating_point()
    beyond = int(((distances > allowed) | distances.isinf()).sum()) if tolerant else differing
    relative = (distances / reference.abs())[reference != 0]
    return _Difference(
        expected.numel(),
        differing,
        beyond,
        float(distances.max()),
        float(relative.max()) if len(relative) else 0.0,
    )


def _bits_differ(first: Tensor, second: Tensor) -> Tensor:
    """Which elements have other bits, as a mask of one dimension."""
    rows = [row_of(tensor.detach().cpu()).view(-1, 1).view(torch.uint8) for tensor in (first, second)]
    return (rows[0] != rows[1]).any(dim=1)
