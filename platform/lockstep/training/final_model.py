"""Traces the final model in the process that trained it, which has already imported what that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.errors import first_line
from lockstep.files import replaced, replacing
from lockstep.job.interface import Job
from lockstep.record.final_model import EXAMPLE, FOLDER, GRAPH, FinalModel, Values


def keep_final_model(job: Job, weights: Path, run_folder: Path) -> list[Path]:
    """Trace the model with these weights on the CPU, by torch.export, into `<run_folder>/model/`. Returns the path of its description.

    The graph has no pickles and none of the job's code: loading it runs neither. Returns no path where the job gives no example
    input. A model that cannot be traced does not fail the run: the description says why.
    """
    folder = run_folder / FOLDER
    try:
        example = job.example_input()
        if example is None:
            return []
        described = _traced(job, weights, example if isinstance(example, tuple) else (example,), folder)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the job's own code: it may raise anything, and the run has its weights
        described = FinalModel(error=first_line(error)[:500])
    return [described.write(folder)]


def _traced(job: Job, weights: Path, arguments: tuple[Any, ...], folder: Path) -> FinalModel:
    if len(arguments) != 1:
        raise ValueError(
            f"example_input has {len(arguments)} arguments, and a model in MLflow's PyTorch format takes one; "
            "`lockstep export` writes models of several"
        )
    (argument,) = arguments
    model = job.model()
    model.load_state_dict(load_file(weights))
    model.eval()
    with torch.no_grad():
        output = model(argument)
    rows = {0: torch.export.Dim.AUTO}
    graph = torch.export.export(model, (argument,), dynamic_shapes=(rows,))
    with replaced(folder / GRAPH) as aside, aside.open("wb") as archive:
        torch.export.save(graph, archive)
    with replacing(folder / EXAMPLE) as file:
        numpy.save(file, argument.numpy())
    return FinalModel(
        input=_values(argument),
        output=_values(output),
        torch=str(torch.__version__),
        numpy=numpy.__version__,
    )


def _values(tensor: Tensor) -> Values:
    return Values(str(tensor.dtype).removeprefix("torch."), (-1, *tensor.shape[1:]))
