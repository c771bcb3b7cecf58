"""The part of an export that runs the job's code: its model is made, written in a format, and compared with what was written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from lockstep.calls import problems
from lockstep.errors import LockstepError
from lockstep.export import arrays
from lockstep.export.example import example_of
from lockstep.export.exporting import Model, Weights, export_model, export_pretrained
from lockstep.export.formats import FORMATS, Pretrained
from lockstep.job.interface import Job
from lockstep.job.loading import load_job
from lockstep.randomness import model_key, seed_all
from lockstep.spec.fields import Spec
from lockstep.training.auxiliary_state import load_beside, put_beside
from lockstep.training.determinism import determinism
from lockstep.training.failure import as_lockstep_error


def export_here(
    spec: Spec,
    weights: Weights,
    weights_file: Path,
    beside: bool,
    form: str,
    folder: Path,
    inputs: Path | None,
    *,
    fixed: bool,
    rtol: float | None,
) -> Path:
    """Make an artifact of the weights in `weights_file`, in `folder`. `beside`: whether other state is stored beside them."""
    weights = weights._replace(state=safetensors.torch.load_file(weights_file))
    tree = load_beside(weights_file) if beside else {}
    with determinism("fast", spec.threads):
        job = load_job(spec.job.use, spec.job.params)

        def make() -> nn.Module:
            return _model(job, spec.seed, weights, tree)

        if form == Pretrained.name:
            return export_pretrained(weights, job, make, folder)
        example = example_of(job, make())
        if example is None:
            raise problems.NO_EXAMPLE(format=form, job=spec.job.use)
        further = None
        if inputs is not None:
            values = example.values(example.rows if fixed else None)
            further = arrays.inputs_of(arrays.read(inputs), values, example.rows if fixed else None)
        return export_model(
            weights, Model(make, example, further), FORMATS[form], folder, fixed=fixed, rtol=rtol
        )


def _model(job: Job, seed: int, weights: Weights, beside: Mapping[str, Any]) -> nn.Module:
    """The job's model in eval mode, as the run left it: with the weights, and what it computed with besides."""
    seed_all(model_key(seed))
    try:
        model = job.model()
    except (Exception, SystemExit) as error:  # the job's own code
        raise as_lockstep_error(error, "while its model was made") from error
    try:
        put_beside(model, job, weights.state, beside)
    except LockstepError:
        raise
    except (Exception, SystemExit) as error:  # the job's own code
        raise problems.WEIGHTS_UNFIT(run=weights.run, got=" ".join(str(error).split())) from error
    return model.eval()
