"""Traces the final model in the process that trained it, which has already imported what that takes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lockstep.errors import first_line
from lockstep.files import replacing
from lockstep.job.interface import Job
from lockstep.randomness import final_model_key, seed_all
from lockstep.record.mirror.final_model_files import EXAMPLE, FOLDER, GRAPH, FinalModel, Values
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.step.activations import kept_activations


def keep_final_model(job: Job, model: nn.Module, run_folder: Path) -> list[Path]:
    """Trace the trained `model` as it is, on the CPU, by torch.export, into `<run_folder>/model/`. Returns the path of its description.

    The model is moved to the CPU: call it when the run needs it no more. The graph has no pickles and none of the job's code: loading
    it runs neither. Returns no path where the job gives no example input. A model that cannot be traced, or whose graph computes
    something else, does not fail the run: the description says why there is none.
    """
    folder = run_folder / FOLDER
    try:
        example = job.example_input()
        if example is None:
            return []
        described = _traced(model, example if isinstance(example, tuple) else (example,), folder)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the job's own code: it may raise anything, and the run has its weights
        described = FinalModel(error=first_line(error)[:500])
    return [described.write(folder)]


def _traced(model: nn.Module, arguments: tuple[Any, ...], folder: Path) -> FinalModel:
    if len(arguments) != 1:
        raise ValueError(
            f"example_input has {len(arguments)} arguments, and a model in MLflow's PyTorch format takes one; "
            "`lockstep export` writes models of several"
        )
    (argument,) = arguments
    model.cpu().eval()
    with torch.no_grad(), kept_activations(model):
        output = _computed(model, argument)
        rows = {0: torch.export.Dim.AUTO}
        graph = torch.export.export(model, (argument,), dynamic_shapes=(rows,))
        traced_output = _computed(graph.module(), argument)
    if weights_digest({"": traced_output}) != weights_digest({"": output}):
        raise ValueError(
            "on the example input, the traced graph gives other bits than the trained model; look for what forward does otherwise when "
            "it is traced"
        )
    archive = io.BytesIO()  # a full disk under an archive of torch's ends the process
    torch.export.save(graph, archive)
    with replacing(folder / GRAPH) as file:
        file.write(archive.getbuffer())
    with replacing(folder / EXAMPLE) as file:
        numpy.save(file, argument.numpy())
    return FinalModel(
        input=_values(argument),
        output=_values(output),
        torch=str(torch.__version__),
        numpy=numpy.__version__,
    )


def _computed(model: nn.Module, argument: Tensor) -> Tensor:
    """What a model computes of a copy of its input, from the same seeds each time: it may write to it, and draw."""
    seed_all(final_model_key())
    output: Tensor = model(argument.clone())
    return output


def _values(tensor: Tensor) -> Values:
    return Values(str(tensor.dtype).removeprefix("torch."), (-1, *tensor.shape[1:]))
