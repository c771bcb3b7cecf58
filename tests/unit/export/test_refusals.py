"""What an export or a prediction refuses is told as the problem that it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import Problem
from lockstep.export import artifact, problems
from lockstep.export.arrays import check_outputs, inputs_of, write
from lockstep.export.artifact import Value
from lockstep.export.eager_comparison import Tolerance, compare
from lockstep.export.example import Example, example_of
from lockstep.export.exporting import _artifact_outputs, _value
from lockstep.export.formats import FORMATS, format_named, loaded
from lockstep.export.prediction import predicted
from lockstep.export.publication import aside_of
from tests.raised import raises

X, Y = Value(name="x", dtype="float32", shape=("batch", 8)), Value(name="y", dtype="bfloat16", shape=(2,))
ROWS = torch.zeros(2, 3)


def giving(example: Any) -> Any:
    return SimpleNamespace(example_input=lambda: example)


def made(*outputs: Value, form: str = "torchscript") -> Any:
    return SimpleNamespace(outputs=outputs, format=form, runtime="torch 9.0", fixed_batch=None)


def broken(inputs: Any) -> Any:
    raise ValueError("no")


def compared(one: dict[str, Tensor], other: dict[str, Tensor]) -> Any:
    return compare(FORMATS["pt2"], [2], [one], [other], Tolerance(0.0, 0.0))


def exported(folder: Path) -> None:
    """An export that writes nothing."""
    with aside_of(folder, folder / "final.pt2"):
        pass


CALLS: list[tuple[Callable[[Path], Any], Problem[Any], dict[str, Any]]] = [
    (lambda _: format_named("keras"), problems.FORMAT, {"got": "keras"}),
    (lambda _: FORMATS["onnx"].check_size(1 << 32), problems.SIZE, {"format": "onnx", "got": 1 << 32}),
    (lambda _: FORMATS["pt2"].limited("2GB"), problems.FILE_SIZE_OF_ONE, {"got": "2GB", "format": "pt2"}),
    (lambda _: FORMATS["shards"].limited("big"), problems.FILE_SIZE, {"got": "big"}),
    (lambda _: example_of(giving([1]), nn.Linear(1, 1)), problems.EXAMPLE_KIND, {"got": "list"}),
    (lambda _: example_of(giving(torch.tensor(1.0)), nn.Linear(1, 1)), problems.EXAMPLE_ROWS, {"got": "of shape ()"}),
    (lambda _: example_of(giving(()), nn.Linear(1, 1)), problems.EXAMPLE_ROWS, {"got": "that is not there"}),
    (lambda _: inputs_of({"": ROWS}, (X, Y), None), problems.INPUTS_WITHOUT_NAMES, {"wanted": "x, y"}),
    (lambda _: check_outputs(Path("out.npy"), made(X, Y)), problems.OUTPUT_WITHOUT_NAMES, {"got": "x, y"}),
    (lambda _: check_outputs(Path("out.npz"), made(X, Y)), problems.OUTPUT_BFLOAT16, {}),
    (lambda here: write(here / "file" / "out.npy", {"x": ROWS}), problems.OUTPUT_UNWRITABLE, {"got": "File exists"}),
    (lambda here: _artifact_outputs(FORMATS["torchscript"], here / "file", [], fixed=False), problems.NOT_LOADED, {"format": "torchscript"}),
    (lambda _: _value("x", [1, 2], [ROWS, ROWS[0]], 1, fixed=False), problems.OUTPUT_DIMENSIONS, {"name": "x"}),
    (lambda _: predicted(broken, made(X), Example(("x",), (ROWS,), (True,)), 2), problems.PREDICTION_FAILED, {"rows": "rows 0 to 1", "got": "ValueError: no"}),
    (exported, problems.UNWRITABLE, {"got": "No such file or directory"}),
    (lambda here: exported(here / "nowhere"), problems.FOLDER_GONE, {"folder": re.compile("nowhere$")}),
    (lambda here: artifact.read(here / "final.pt2"), problems.UNREADABLE, {}),
    (lambda here: loaded(made(form="safetensors"), here), problems.CANNOT_RUN, {"got": "safetensors"}),
    (lambda here: loaded(made(), here / "file"), problems.OTHER_VERSION, {"wanted": "torch 9.0"}),
    (lambda _: compared({"x": ROWS}, {"y": ROWS}), problems.OTHER_OUTPUTS, {"wanted": "x", "got": "y"}),
    (lambda _: compared({"x": ROWS}, {"x": ROWS[:1]}), problems.OTHER_SHAPE, {"name": "x", "got": "(1, 3) of torch.float32"}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "problem", "facts"), CALLS, ids=[it[1].code for it in CALLS])
def test_a_mistake_is_told(
    call: Callable[[Path], Any], problem: Problem[Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with raises(problem, **facts) as raised:
        call(tmp_path)
    assert "\n" not in str(raised.value)
