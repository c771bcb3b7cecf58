"""The formats of an artifact: how a model is written in each, and how the file becomes a function again.

What torch's exporters warn about themselves is not shown; what they warn about the model is returned.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ExportError, SpecError, first_line
from lockstep.export.artifact import BATCH, Artifact, Format
from lockstep.export.example import Example, Inputs
from lockstep.job.frames import place_in_job

Outputs = dict[str, Tensor]
Call = Callable[[Inputs], Outputs]

OF_ONNX = ("onnx", "onnxscript", "onnxruntime")
"""What the extra `onnx` installs: the format, torch's exporter to it, and what runs it."""

SIZES = "take sizes from the input's shape wherever forward needs them, or export it with --fixed-batch"
"""What to do where a number of rows is written into a model."""


def check_installed(form: Format) -> None:
    """SpecError where a format needs what is not installed."""
    missing = [name for name in OF_ONNX if form == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise SpecError(
            f"format: onnx needs {', '.join(missing)}; pip install 'lockstep-train[onnx]', or choose another format"
        )


def runtime_of(form: Format) -> str:
    """What loads a format here, with its version."""
    if form != "onnx":
        return f"torch {torch.__version__}"
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"


def named_outputs(value: Any) -> Outputs:
    """A model's outputs by name: `output`, or `output_0` and so on, or the keys of a mapping. ExportError for anything else."""
    if isinstance(value, Tensor):
        return {"output": value}
    if isinstance(value, Mapping):
        named = dict(value)
    elif isinstance(value, list | tuple):
        named = {f"output_{i}": output for i, output in enumerate(value)}
    else:
        named = {"output": value}
    for name, output in named.items():
        if not (isinstance(output, Tensor) and isinstance(name, str)):
            raise ExportError(
                f"export: output {name!r} of the model is {type(output).__name__}, wanted a tensor, or a tuple or mapping of tensors"
            )
    return named


# --- writing ----------------------------------------------------------------------------------------------------


def write(
    form: Format, model: nn.Module, example: Example, outputs: Sequence[str], path: Path, *, fixed: bool
) -> tuple[str, ...]:
    """Write a model in eval mode to `path`; what the exporter warned of. ExportError where the model cannot be exported."""
    traced = (
        example.tensors if fixed else example.take([i % example.rows for i in range(max(2, example.rows))])
    )
    archive = io.BytesIO()  # a full disk under an archive of torch's ends the process
    try:
        with torch.no_grad(), _own_warnings() as heard:
            if form == "torchscript":
                # The check of torch is one of the same example; the comparison with eager mode does more.
                trace = torch.jit.trace(model, traced, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
                torch.jit.save(trace, archive)
            else:
                program = _program(model, traced, example, fixed=fixed)
                if form == "pt2":
                    torch.export.save(program, archive)
                else:
                    _write_onnx(program, example, outputs, path, fixed=fixed)
            if form != "onnx":
                path.write_bytes(archive.getbuffer())
    except (ExportError, OSError):
        raise
    except Exception as error:  # tracing runs the job's own code, and torch's exporters raise anything
        raise ExportError(
            f"export: {form}: the model cannot be traced{place_in_job(error)}: {first_line(error)}"
        ) from error
    return tuple(heard)


def _program(
    model: nn.Module, traced: Inputs, example: Example, *, fixed: bool
) -> torch.export.ExportedProgram:
    from torch._dynamo.exc import UserError, UserErrorType

    shapes = None
    if not fixed:
        batch = torch.export.Dim(BATCH)
        every = [{0: batch} if has_rows else None for has_rows in example.has_rows]
        shapes = inspect.signature(model.forward).bind(*every).arguments
    try:
        return torch.export.export(model, traced, dynamic_shapes=shapes)
    except UserError as error:
        if error.error_type is not UserErrorType.CONSTRAINT_VIOLATION:
            raise
        reasons = [line.strip(" -") for line in str(error).splitlines() if line.startswith("  - ")]
        raise ExportError(
            f"export: the model does not take any number of rows: {' '.join((reasons or [first_line(error)])[0].split())}; "
            f"{SIZES}"
        ) from error


def _write_onnx(
    program: torch.export.ExportedProgram,
    example: Example,
    outputs: Sequence[str],
    path: Path,
    *,
    fixed: bool,
) -> None:
    shapes = [{0: BATCH} if has_rows else None for has_rows in example.has_rows]
    onnx_program = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        input_names=example.names,
        output_names=outputs,
        dynamic_shapes=None if fixed else shapes,
    )
    assert onnx_program is not None  # it is, of the exporter by dynamo
    onnx_program.save(path, external_data=False)


@contextmanager
def _own_warnings() -> Iterator[list[str]]:
    """The first lines of what a tracer warns about the model; all else that is warned of meanwhile is about the exporters."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lines
    of_model = torch.jit.TracerWarning  # type: ignore[attr-defined]
    lines += dict.fromkeys(
        str(warning.message).splitlines()[0] for warning in caught if warning.category is of_model
    )


# --- reading ----------------------------------------------------------------------------------------------------


def load(form: Format, path: Path) -> Call:
    """An artifact as a function of its inputs. Raises whatever its runtime raises."""
    with _own_warnings():
        if form == "onnx":
            return _of_onnx(path)
        if form == "torchscript":
            module = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
        else:
            module = torch.export.load(path).module()
    return lambda inputs: named_outputs(module(*inputs))


def _of_onnx(path: Path) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = [node.name for node in session.get_inputs()]
    outputs = [node.name for node in session.get_outputs()]

    def call(given: Inputs) -> Outputs:
        arrays = {name: value.numpy() for name, value in zip(inputs, given, strict=True)}
        return {
            name: torch.from_numpy(value)
            for name, value in zip(outputs, session.run(None, arrays), strict=True)
        }

    return call


def loaded(artifact: Artifact, path: Path) -> Call:
    """An artifact as a function of its inputs. SpecError where what it needs is not installed, ExportError where it cannot be loaded."""
    check_installed(artifact.format)
    try:
        return load(artifact.format, path)
    except Exception as error:
        raise ExportError(
            f"export: {str(path)!r} cannot be loaded by {runtime_of(artifact.format)}: {first_line(error)}; "
            f"it was exported with {artifact.runtime}: export it again"
        ) from error
