"""The formats of an artifact: how a model is written in each, and how the file becomes a function again.

What torch's exporters warn about themselves is not shown; what they warn about the model is returned.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ExportError, first_line
from lockstep.export import problems
from lockstep.export.artifact import BATCH, Artifact
from lockstep.export.example import Example, Inputs
from lockstep.job.frames import place_in_job

_UNITS = {
    prefix + unit: base**power
    for power, prefix in enumerate(("", "K", "M", "G", "T"))
    for unit, base in (("B", 1000), ("IB", 1024))
    if prefix or unit == "B"
}
_SIZE = re.compile(rf"(\d{{1,15}}) *({'|'.join(_UNITS)})")

Outputs = dict[str, Tensor]
Call = Callable[[Inputs], Outputs]


class Traced(NamedTuple):
    """What a model is traced on."""

    inputs: Inputs
    example: Example
    """The example of the job that they are taken from."""
    outputs: Sequence[str]
    """The names of the model's outputs."""
    fixed: bool
    """Whether the artifact takes just as many rows as the example has."""


class ExportFormat:
    """A form of a model. A new one is a class here, and an object of it in `FORMATS`."""

    name: str
    suffix: str
    """That of the file; empty for a folder."""
    packages: tuple[str, ...] = ()
    """What it needs beside torch."""
    most_bytes: int | None = None
    """The weights that it has room for."""
    rtol: float = 0.0
    """The relative difference to eager mode that is allowed where nobody says another one."""
    advice: str = "look for what forward does otherwise when it is traced, or allow a difference with --rtol"
    """What to do about a difference."""
    cannot_predict: str = ""
    """Why it cannot be run on the rows of a file; empty where it can."""

    def check_installed(self) -> None:
        """SpecError where it needs what is not installed."""
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if missing:
            raise problems.PACKAGES(format=self.name, got=", ".join(missing))

    def check_size(self, size: int) -> None:
        """SpecError for weights of `size` bytes that it has no room for."""
        if self.most_bytes is not None and size > self.most_bytes:
            raise problems.SIZE(format=self.name, got=size)

    def limited(self, size: str) -> ExportFormat:
        """The format with files of at most this size. SpecError where it is one file."""
        raise problems.FILE_SIZE_OF_ONE(got=size, format=self.name)

    @property
    def runtime(self) -> str:
        """What loads it here, with its version."""
        return f"torch {torch.__version__}"

    def write(self, model: nn.Module, traced: Traced, path: Path) -> None:
        """Write a model in eval mode to `path`. Raises whatever its exporter raises."""
        raise NotImplementedError

    def load(self, path: Path) -> Call:
        """An artifact as a function of its inputs. Raises whatever its runtime raises."""
        raise NotImplementedError


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
            raise problems.OUTPUT_KIND(name=name, got=type(output).__name__)
    return named


# --- writing ----------------------------------------------------------------------------------------------------


def write(
    form: ExportFormat, model: nn.Module, example: Example, outputs: Sequence[str], path: Path, *, fixed: bool
) -> tuple[str, ...]:
    """Write a model in eval mode to `path`; what the exporter warned of. ExportError where the model cannot be exported."""
    inputs = (
        example.tensors if fixed else example.take([i % example.rows for i in range(max(2, example.rows))])
    )
    try:
        with torch.no_grad(), _tracer_warnings() as heard:
            form.write(model, Traced(inputs, example, outputs, fixed), path)
    except (ExportError, OSError):
        raise
    except Exception as error:  # tracing runs the job's own code, and torch's exporters raise anything
        where = place_in_job(error)
        raise problems.NOT_TRACED(format=form.name, where=where, got=first_line(error)) from error
    return tuple(heard)


def _save(write: Callable[[io.BytesIO], object], path: Path) -> None:
    """Write an archive of torch's by way of memory: a full disk under one ends the process."""
    archive = io.BytesIO()
    write(archive)
    path.write_bytes(archive.getbuffer())


def _program(model: nn.Module, traced: Traced) -> torch.export.ExportedProgram:
    from torch._dynamo.exc import UserError, UserErrorType

    shapes = None
    if not traced.fixed:
        batch = torch.export.Dim(BATCH)
        every = [{0: batch} if has_rows else None for has_rows in traced.example.has_rows]
        shapes = inspect.signature(model.forward).bind(*every).arguments
    try:
        return torch.export.export(model, traced.inputs, dynamic_shapes=shapes)
    except UserError as error:
        if error.error_type is not UserErrorType.CONSTRAINT_VIOLATION:
            raise
        reasons = [line.strip(" -") for line in str(error).splitlines() if line.startswith("  - ")]
        reason = " ".join((reasons or [first_line(error)])[0].split())
        raise problems.FIXED_ROWS(got=reason) from error


@contextmanager
def _tracer_warnings() -> Iterator[list[str]]:
    """The first lines of what a tracer warns about the model; all else that is warned of meanwhile is about the exporters."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lines
    of_model = torch.jit.TracerWarning  # type: ignore[attr-defined]
    lines += dict.fromkeys(
        str(warning.message).splitlines()[0] for warning in caught if warning.category is of_model
    )


# --- the formats ------------------------------------------------------------------------------------------------


class Pt2(ExportFormat):
    """A program of torch.export."""

    name, suffix = "pt2", ".pt2"

    def write(self, model: nn.Module, traced: Traced, path: Path) -> None:
        program = _program(model, traced)
        _save(lambda archive: torch.export.save(program, archive), path)

    def load(self, path: Path) -> Call:
        module = torch.export.load(path).module()
        return lambda inputs: named_outputs(module(*inputs))


class Onnx(ExportFormat):
    """A graph that ONNX Runtime executes."""

    name, suffix = "onnx", ".onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")  # the format, torch's exporter to it, and what runs it
    most_bytes = 2_000_000_000  # a file is one message of Protocol Buffers, which holds less than 2 GiB
    rtol = 1e-4  # it adds in another order, and has functions such as tanh of its own: in float32 some 1e-6

    @property
    def runtime(self) -> str:
        import onnxruntime

        return f"onnxruntime {onnxruntime.__version__}"

    def write(self, model: nn.Module, traced: Traced, path: Path) -> None:
        shapes = [{0: BATCH} if has_rows else None for has_rows in traced.example.has_rows]
        onnx_program = torch.onnx.export(
            _program(model, traced),
            dynamo=True,
            verbose=False,
            input_names=traced.example.names,
            output_names=traced.outputs,
            dynamic_shapes=None if traced.fixed else shapes,
        )
        assert onnx_program is not None  # it is, of the exporter by dynamo
        onnx_program.save(path, external_data=False)

    def load(self, path: Path) -> Call:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        inputs = [node.name for node in session.get_inputs()]
        outputs = [node.name for node in session.get_outputs()]

        def call(values: Inputs) -> Outputs:
            arrays = {name: value.numpy() for name, value in zip(inputs, values, strict=True)}
            return {
                name: torch.from_numpy(value)
                for name, value in zip(outputs, session.run(None, arrays), strict=True)
            }

        return call


class TorchScript(ExportFormat):
    """A trace, for runtimes that read no other format."""

    name, suffix = "torchscript", ".pt"
    advice = "a trace keeps the branches that the example took: take them out of forward, or export pt2"

    def write(self, model: nn.Module, traced: Traced, path: Path) -> None:
        # The check of torch is one of the same example; the comparison with eager mode does more.
        trace = torch.jit.trace(model, traced.inputs, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
        _save(lambda archive: torch.jit.save(trace, archive), path)

    def load(self, path: Path) -> Call:
        module = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
        return lambda inputs: named_outputs(module(*inputs))


class Safetensors(ExportFormat):
    """The weights alone, which no code of the job's writes."""

    name, suffix = "safetensors", ".safetensors"
    cannot_predict = "has weights alone"


class Shards(Safetensors):
    """The weights alone in several files with an index, as Hugging Face reads them."""

    name, suffix = "shards", ""
    most_file_bytes = 5_000_000_000
    """The most bytes of tensors in a file, but of one that has a single tensor: as `save_pretrained` of transformers has long had it."""

    def limited(self, size: str) -> Shards:
        """The format with files of at most this size, written as for `save_pretrained`: `2GB`, `500MiB`. SpecError for anything else."""
        match = _SIZE.fullmatch(size.strip().upper())
        if match is None or not (most := int(match[1]) * _UNITS[match[2]]):
            raise problems.FILE_SIZE(got=size)
        limited = Shards()
        limited.most_file_bytes = most
        return limited


class Pretrained(ExportFormat):
    """The folder that the library of a model writes."""

    name, suffix = "pretrained", ""
    cannot_predict = "is run by the library that it is for"


FORMATS: dict[str, ExportFormat] = {
    form.name: form for form in (Pt2(), Onnx(), TorchScript(), Safetensors(), Shards(), Pretrained())
}


def either(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def format_named(name: str) -> ExportFormat:
    """The format of this name. SpecError where there is none."""
    if name not in FORMATS:
        raise problems.FORMAT(got=name, wanted=either(list(FORMATS)))
    return FORMATS[name]


def check_predicts(form: ExportFormat) -> None:
    """SpecError for a format that cannot be run on the rows of a file."""
    if form.cannot_predict:
        others = [candidate.name for candidate in FORMATS.values() if not candidate.cannot_predict]
        raise problems.NO_PREDICTION(format=form.name, why=form.cannot_predict, wanted=either(others))


# --- reading ----------------------------------------------------------------------------------------------------


def artifact_path(folder: Path, form: ExportFormat, weights: str) -> Path:
    """The file of an artifact in the folder of its run."""
    return folder / "export" / form.name / f"{weights}{form.suffix}"


def load(form: ExportFormat, path: Path) -> Call:
    """An artifact as a function of its inputs. Raises whatever its runtime raises."""
    with _tracer_warnings():
        return form.load(path)


def loaded(artifact: Artifact, path: Path) -> Call:
    """An artifact as a function of its inputs. SpecError where what it needs is not installed, ExportError where it cannot be loaded."""
    form = FORMATS.get(artifact.format)
    if form is None or form.cannot_predict:
        raise problems.CANNOT_RUN(file=path, got=artifact.format)
    form.check_installed()
    try:
        return load(form, path)
    except Exception as error:
        raise problems.OTHER_VERSION(
            file=path, runtime=form.runtime, got=first_line(error), wanted=artifact.runtime
        ) from error
