"""Making an artifact of a run's weights: written aside, loaded again, compared with eager mode, and only then given its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from lockstep.checkpoint.stored_tensor import in_memory
from lockstep.checkpoint.tensor_file import header_of, order_of
from lockstep.errors import first_line
from lockstep.export import problems
from lockstep.export.artifact import (
    BATCH,
    Artifact,
    Parity,
    Value,
    description,
    dtype_name,
    names_in,
    sha256,
)
from lockstep.export.eager_comparison import Tolerance, compare
from lockstep.export.example import Example, Inputs, slices
from lockstep.export.formats import (
    ExportFormat,
    Outputs,
    Pretrained,
    Safetensors,
    Shards,
    artifact_path,
    load,
    named_outputs,
    write,
)
from lockstep.export.publication import aside_of
from lockstep.job.frames import place_in_job
from lockstep.job.interface import Job
from lockstep.parsing import canonical_json
from lockstep.tensor_bytes import bytes_of
from lockstep.training.failure import as_lockstep_error
from lockstep.training.integrity.state_digest import tensor_digests, weights_digest
from lockstep.training.stored_weights import INDEX, SINGLE, stored_folder

AT_ONCE = 256
"""Rows of a file that are compared, or predicted, in one call where nobody says."""


class Weights(NamedTuple):
    """Weights of a run: which, of which step, and the digest that the run's record has of them."""

    run: str
    step: int
    name: str
    digest: str
    state: Mapping[str, Any]
    """Tensors, or `StoredTensor`s."""


class Model(NamedTuple):
    """What is exported: `make` gives it anew with the weights, in eval mode. `further` inputs are compared besides the example."""

    make: Callable[[], nn.Module]
    example: Example
    further: Example | None = None


def export_weights(weights: Weights, form: Safetensors, folder: Path) -> Path:
    """Write weights alone, as safetensors with their origin as metadata, into the run's folder: a file, or a folder of several with their index.

    Of stored weights it has one tensor after another in memory. Returns the file, or the folder.
    """

    def write_artifact(path: Path) -> Artifact:
        if isinstance(form, Shards):
            path.mkdir()
            _write_shards(weights, form.most_file_bytes, path)
        else:
            _write_tensors(weights, sorted(weights.state), path)
        again = weights_digest(stored_folder(path), in_memory)
        if again != weights.digest:
            raise problems.OTHER_WEIGHTS(format=form.name, got=f"the weights have the digest {again}")
        return _artifact(weights, form, path, None, (), (), _exact_parity(weights), ())

    return _published(folder, artifact_path(folder, form, weights.name), write_artifact)


def _write_tensors(weights: Weights, names: Sequence[str], path: Path) -> None:
    """Write those of the weights into one file, one after another."""
    origin = {"run": weights.run, "step": str(weights.step), "weights": weights.name}
    state = {name: weights.state[name] for name in names}
    shapes = {name: torch.empty(v.shape, dtype=v.dtype, device="meta") for name, v in state.items()}
    with path.open("wb") as file:
        file.write(header_of(shapes, {**origin, "weights_digest": weights.digest, "format": "pt"}))
        for name in order_of(shapes):
            file.write(bytes_of(in_memory(state[name]).detach().cpu().contiguous()))


def _write_shards(weights: Weights, most: int, folder: Path) -> None:
    """Write weights into files of at most `most` bytes of tensors, in the order of their names, with the index; into one file where they fit."""
    parts: list[list[str]] = []
    room = 0
    for name in sorted(weights.state):
        size = weights.state[name].nbytes
        if size > room or not parts:
            parts.append([])
            room = most
        parts[-1].append(name)
        room -= size
    if len(parts) <= 1:
        _write_tensors(weights, sorted(weights.state), folder / SINGLE)
        return
    files = {
        f"model-{i:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts, start=1)
    }
    for file, names in files.items():
        _write_tensors(weights, names, folder / file)
    index = {
        "metadata": {"total_size": sum(value.nbytes for value in weights.state.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / INDEX).write_bytes(canonical_json(index, indent=1))


def export_pretrained(weights: Weights, job: Job, make: Callable[[], nn.Module], folder: Path) -> Path:
    """Write a model as the library that it is from does, into a folder of the run's folder; that folder.

    SpecError where the library of the model has no such form, ExportError where it reads other weights than it wrote.
    """

    def write_artifact(path: Path) -> Artifact:
        model = make()
        path.mkdir()
        try:
            job.save_pretrained(model, path)
            again = job.load_pretrained(model, path).state_dict()
        except NotImplementedError as error:
            raise problems.NOT_PRETRAINED(got=first_line(error)) from error
        except safetensors.SafetensorError:  # the disk's
            raise
        except Exception as error:  # the job's own code, and a library's
            raise as_lockstep_error(error, "while it was saved and read as pretrained") from error
        if weights_digest(again) != weights.digest:
            original, others = tensor_digests(weights.state), tensor_digests(again)
            names = [name for name in {**original, **others} if original.get(name) != others.get(name)]
            difference = f"{len(names)} weights are other ones, such as {names[0]!r}"
            raise problems.OTHER_WEIGHTS(format="pretrained", got=difference)
        return _artifact(
            weights, Pretrained(), path, None, (), (), _exact_parity(weights), (), runtime=_library_of(model)
        )

    return _published(folder, artifact_path(folder, Pretrained(), weights.name), write_artifact)


def _exact_parity(weights: Weights) -> Parity:
    """The comparison of weights alone, of which no bit differs."""
    return Parity(
        rtol=0.0,
        atol=0.0,
        batch_sizes=(),
        elements=sum(tensor.shape.numel() for tensor in weights.state.values()),
        differing=0,
        largest_difference=0.0,
        largest_relative=0.0,
    )


def _library_of(model: nn.Module) -> str:
    """The package that a model's class is from, with its version where it has one."""
    name = type(model).__module__.partition(".")[0]
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return name


def export_model(
    weights: Weights, model: Model, form: ExportFormat, folder: Path, *, fixed: bool, rtol: float | None
) -> Path:
    """Write a model in a format into the run's folder; the file. With `fixed` it takes as many rows as the example, else any number.

    ExportError where it cannot be exported, or computes something else than eager mode: nothing is left behind then.
    """
    form.check_installed()
    example = model.example
    form.check_size(sum(tensor.nbytes for tensor in weights.state.values()))
    batches = list(_batches(example, fixed=fixed))
    turned = len(batches) - 1
    if model.further is not None:
        rows_at_once = example.rows if fixed else AT_ONCE
        batches += [
            model.further.take(rows) for rows in slices(model.further.rows, rows_at_once, padded=fixed)
        ]
    sizes = [len(batch[0]) for batch in batches]
    within = Tolerance.of(form, rtol)
    expected = _eager_outputs(model.make(), batches)
    names = list(expected[0])

    def write_artifact(path: Path) -> Artifact:
        notes = write(form, model.make(), example, names, path, fixed=fixed)
        actual = _artifact_outputs(form, path, batches, fixed=fixed)
        parity = compare(form, sizes, expected, actual, within)
        fixed_batch = example.rows if fixed else None
        return _artifact(
            weights,
            form,
            path,
            fixed_batch,
            example.values(fixed_batch),
            tuple(
                _value(name, sizes, [outputs[name] for outputs in expected], turned, fixed=fixed)
                for name in names
            ),
            parity,
            notes,
        )

    return _published(folder, artifact_path(folder, form, weights.name), write_artifact)


def _batches(example: Example, *, fixed: bool) -> Iterator[Inputs]:
    """The example as it is; then 1, 2, as many and more than twice as many of its rows, from the first and from the middle one on."""
    yield example.tensors
    rows = example.rows
    sizes = [rows] if fixed else sorted({1, 2, rows, 2 * rows + 1})
    for size in sizes:
        for start in sorted({0, rows // 2}):
            yield example.take([(start + i) % rows for i in range(size)])


def _eager_outputs(model: nn.Module, batches: Sequence[Inputs]) -> list[Outputs]:
    """What the model itself computes; the first batch is the example."""
    outputs = []
    with torch.no_grad():
        for batch in batches:
            try:
                value = model(*_cloned(batch))
            except Exception as error:  # the job's own code
                if len(batch[0]) == len(batches[0][0]):
                    raise as_lockstep_error(error, "in eval mode, on the example input") from error
                failed = f"on {len(batch[0])} it fails{place_in_job(error)}: {first_line(error)}"
                raise problems.FIXED_ROWS(got=failed) from error
            outputs.append(named_outputs(value))
    return outputs


def _artifact_outputs(
    form: ExportFormat, path: Path, batches: Sequence[Inputs], *, fixed: bool
) -> list[Outputs]:
    """What the artifact computes once it is loaded again."""
    try:
        call = load(form, path)
    except Exception as error:
        raise problems.NOT_LOADED(format=form.name, got=first_line(error)) from error
    outputs = []
    with torch.no_grad():
        for batch in batches:
            try:
                outputs.append(call(_cloned(batch)))
            except Exception as error:
                advice = "" if fixed else problems.SIZES
                raise problems.ROWS_FAIL(
                    format=form.name, rows=len(batch[0]), got=first_line(error), advice=advice
                ) from error
    return outputs


def _cloned(batch: Inputs) -> Inputs:
    """A copy: a model may write to its input."""
    return tuple(tensor.clone() for tensor in batch)


def _value(name: str, sizes: Sequence[int], tensors: Sequence[Tensor], turned: int, *, fixed: bool) -> Value:
    """How an output is described: a size that is the batch's in every call is BATCH, one that changes otherwise None.

    In a `fixed` batch a size may be the batch's by chance: it is not where call `turned`, of the same rows from the middle one on, has not
    the same rows of the output.
    """
    if len({tensor.dim() for tensor in tensors}) > 1:
        raise problems.OUTPUT_DIMENSIONS(name=name)
    shape: list[int | str | None] = []
    for of_dim in zip(*(tensor.shape for tensor in tensors), strict=True):
        if not fixed and list(of_dim) == list(sizes):
            shape.append(BATCH)
        else:
            shape.append(of_dim[0] if len(set(of_dim)) == 1 else None)
    if fixed and sizes[0] in shape[1:] and not _is_turned(tensors[0], tensors[turned]):
        shape[1:] = [None if size == sizes[0] else size for size in shape[1:]]
    return Value.model_validate({"name": name, "dtype": dtype_name(tensors[0].dtype), "shape": shape})


def _is_turned(first: Tensor, turned: Tensor) -> bool:
    """Whether an output has the rows of the first one from the middle one on, up to rounding."""
    rows = first.roll(-(len(first) // 2), 0)
    return rows.shape == turned.shape and torch.allclose(rows, turned, rtol=1e-4, atol=1e-5, equal_nan=True)


def _artifact(
    weights: Weights,
    form: ExportFormat,
    path: Path,
    fixed_batch: int | None,
    inputs: tuple[Value, ...],
    outputs: tuple[Value, ...],
    parity: Parity,
    notes: tuple[str, ...],
    *,
    runtime: str | None = None,
) -> Artifact:
    names = names_in(path)
    return Artifact(
        run=weights.run,
        step=weights.step,
        weights=weights.name,
        weights_digest=weights.digest,
        format=form.name,
        file=f"{weights.name}{form.suffix}",
        files=names,
        bytes=sum(file.stat().st_size for file in [path / name for name in names] or [path]),
        sha256=sha256(path, names),
        torch=torch.__version__,
        runtime=runtime or form.runtime,
        device="cpu",
        fixed_batch=fixed_batch,
        inputs=inputs,
        outputs=outputs,
        parity=parity,
        notes=notes,
    )


def _published(folder: Path, file: Path, write_artifact: Callable[[Path], Artifact]) -> Path:
    """Have an artifact made in a folder of its own, and give it and its description their names once it is whole."""
    with aside_of(folder, file) as path:
        artifact = write_artifact(path)
        description(path).write_text(artifact.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return file
