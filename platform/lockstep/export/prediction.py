"""Calling an artifact on many rows, batch by batch."""

from __future__ import annotations

import torch

from lockstep.errors import first_line
from lockstep.export import problems
from lockstep.export.artifact import Artifact
from lockstep.export.example import Example, slices
from lockstep.export.exporting import AT_ONCE
from lockstep.export.formats import Call, Outputs


def batch_size(artifact: Artifact, asked: int | None) -> int:
    """How many rows go into one call. SpecError where the artifact takes another number than is asked for."""
    fixed = artifact.fixed_batch
    if fixed is not None and asked not in (None, fixed):
        raise problems.FIXED_BATCH(got=asked, wanted=fixed)
    return fixed or asked or AT_ONCE


def predicted(call: Call, artifact: Artifact, inputs: Example, size: int) -> Outputs:
    """The outputs for all rows, from calls of `size` rows. The last call of an artifact that takes no fewer is filled up.

    SpecError where an output has no row for each row of the inputs, and one call is not enough.
    """
    fixed, rows = artifact.fixed_batch, inputs.rows
    without_rows = [value.name for value in artifact.outputs if not value.has_rows(fixed)]
    if without_rows and (rows > size or fixed is not None):
        raise problems.WITHOUT_ROWS(name=without_rows[0], rows=rows)
    parts: list[Outputs] = []
    with torch.no_grad():
        for batch in slices(rows, size, padded=fixed is not None):
            where = f"rows {batch[0]} to {batch[-1]}"
            try:
                parts.append(call(inputs.take(batch)))
            except Exception as error:
                failed = first_line(error)
                raise problems.PREDICTION_FAILED(format=artifact.format, rows=where, got=failed) from error
            for name, output in () if without_rows else parts[-1].items():
                shape = (len(batch), *parts[0][name].shape[1:])
                if output.shape != shape:
                    shapes = {"got": tuple(output.shape), "wanted": shape}
                    raise problems.PREDICTION_SHAPE(format=artifact.format, rows=where, name=name, **shapes)
    if without_rows:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts])[:rows] for name in parts[0]}
