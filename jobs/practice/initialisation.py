"""How initial weights set the size of gradients: Xavier's, Kaiming's, and all ones, as a figure.

python -m jobs.practice.initialisation [--plot FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

import lockstep
from jobs.practice.points import CLASSES, FEATURES, Points

Initialisation = Literal["xavier", "kaiming", "ones"]

FILL: Mapping[str, Callable[[Tensor], Tensor]] = {
    "xavier": nn.init.xavier_uniform_,
    "kaiming": nn.init.kaiming_uniform_,
    "ones": nn.init.ones_,
}

SPEC: dict[str, Any] = {
    "job": {"use": "jobs.practice.initialisation:DeepPoints"},
    "length": {"steps": 40},
    "batch": {"global": 64, "micro": 32},
    "optimizer": {"name": "sgd", "lr": 0.05},
    "clip_norm": 1.0,  # as recorded, the norm is that before clipping
    "record": {"uri": "off"},
}


class DeepPoints(Points):
    """Six layers of ReLU, whose weights begin as `initialisation` says and whose biases begin at zero."""

    class Params(lockstep.Params):
        initialisation: Initialisation = "kaiming"
        width: PositiveInt = 32
        depth: PositiveInt = 6

    params: Params

    def model(self) -> nn.Module:
        widths = [FEATURES, *[self.params.width] * self.params.depth]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))
        for layer in model:
            if isinstance(layer, nn.Linear):
                FILL[self.params.initialisation](layer.weight)
                nn.init.zeros_(layer.bias)
        return model


def norms_by_layer(initialisation: Initialisation) -> list[float]:
    """The norm of the first gradient of each layer's weights, from the first layer to the last."""
    job = DeepPoints(DeepPoints.Params(initialisation=initialisation))
    torch.manual_seed(0)
    model, data = job.model(), job.train_data()
    x, y = data[:64]
    loss = job.loss(model, (x, y))
    torch.autograd.backward(loss.total / loss.weight)
    return [float(p.grad.norm()) for p in model.parameters() if p.dim() > 1 and p.grad is not None]


def norms_by_step(initialisation: Initialisation) -> list[float]:
    """The norm of all gradients in each step of a short run, from its ledger."""
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        params = {"initialisation": initialisation}
        spec = {**SPEC, "job": {**SPEC["job"], "params": params}, "checkpoint": {"storage": folder}}
        result = lockstep.train(spec, local=True)
        column = pq.read_table(Path(result.folder, "ledger.parquet"), columns=["grad_norm"])
        norms: list[float] = column["grad_norm"].to_pylist()
    return norms


def draw(layers: Mapping[str, Sequence[float]], steps: Mapping[str, Sequence[float]], file: Path) -> None:
    """Both as a figure, in the format that the file's name ends with."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    by_layer, by_step = figure.subplots(1, 2)
    for name in layers:
        by_layer.plot(range(1, len(layers[name]) + 1), layers[name], "o-", label=name)
        by_step.plot(range(1, len(steps[name]) + 1), steps[name], label=name)
    by_layer.set(title="first gradient", xlabel="layer", ylabel="norm", yscale="log")
    by_step.set(title="all layers", xlabel="step", yscale="log")
    by_layer.legend(frameon=False)
    figure.savefig(file)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.practice.initialisation")
    parser.add_argument("--plot", type=Path, default=Path("initialisation.svg"), help="default: %(default)s")
    file: Path = parser.parse_args(words).plot
    every = get_args(Initialisation)
    layers = {name: norms_by_layer(name) for name in every}
    draw(layers, {name: norms_by_step(name) for name in every}, file)
    for name, norms in layers.items():
        print(f"{name:<10}" + "".join(f"{norm:>12.3g}" for norm in norms))
    print(f"drawn: {file}")


if __name__ == "__main__":
    main()
