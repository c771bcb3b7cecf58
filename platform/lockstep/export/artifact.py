"""What lies beside an exported model: which weights it has, how it is called, and how it was compared. One JSON file."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import pydantic
import torch

from lockstep.export import problems

BATCH = "batch"
"""Stands in a shape for the number of rows, where any number will do."""


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class Value(_Part):
    """An input or an output. A size is a number, BATCH, or None where it follows from the batch in another way."""

    name: str
    dtype: str
    shape: tuple[int | Literal["batch"] | None, ...]

    def has_rows(self, fixed_batch: int | None) -> bool:
        """Whether its first dimension counts the rows of a batch, and no other one follows from how many there are: then calls can be joined."""
        first, *inner = self.shape or (None,)
        return first == (fixed_batch or BATCH) and all(isinstance(size, int) for size in inner)


class Parity(_Part):
    """How the artifact, loaded again, compares with eager mode: |found - expected| ≤ atol + rtol · |expected|."""

    rtol: float
    atol: float
    batch_sizes: tuple[int, ...]
    elements: int
    """Elements of all outputs that were compared; of weights alone, the elements of the weights."""
    differing: int
    """How many of them have other bits."""
    largest_difference: float
    largest_relative: float
    """The largest |found - expected| / |expected|, where the expected value is not 0."""


class Artifact(_Part):
    """An exported model."""

    run: str
    step: int
    weights: str
    """`final`, `ema` or `best`: the file of weights that it was made of."""
    weights_digest: str
    format: str
    """Its name in `formats.FORMATS`."""
    file: str
    files: tuple[str, ...] = ()
    """The names of its files, where it is a folder: others in there are a user's."""
    bytes: int
    sha256: str
    torch: str
    runtime: str
    """What loaded it for the comparison."""
    device: str
    fixed_batch: int | None
    """The only number of rows that it takes, or None where it takes any."""
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parity: Parity
    notes: tuple[str, ...]
    """What the exporter warned of."""

    def paths(self, file: Path) -> list[Path]:
        """The file that the artifact is, or its files in its folder."""
        return [file / name for name in self.files] or [file]


def description(file: Path) -> Path:
    """The JSON file beside an artifact."""
    return file.with_suffix(".json")


def read(file: Path) -> Artifact:
    """What lies beside the artifact `file`. ExportError where it cannot be read, or is not of this file."""
    try:
        artifact = Artifact.model_validate_json(description(file).read_bytes())
        digest = sha256(file, artifact.files)
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise problems.UNREADABLE(file=file, got=text) from error
    if digest != artifact.sha256:
        named = description(file).name
        raise problems.CHANGED(file=file, got=digest, description=named, wanted=artifact.sha256)
    return artifact


def described(file: Path) -> Artifact | None:
    """The description beside `file`, whatever that is; None where there is none that can be read."""
    try:
        return Artifact.model_validate_json(description(file).read_bytes())
    except (OSError, ValueError):
        return None


def names_in(artifact: Path) -> tuple[str, ...]:
    """The names of the files in an artifact's folder, sorted; none where it is a file."""
    files = sorted(file for file in artifact.rglob("*") if file.is_file())
    return tuple(file.relative_to(artifact).as_posix() for file in files)


def sha256(artifact: Path, names: Collection[str] = ()) -> str:
    """The sha256 of a file's content; of a folder, that of the lines `<sha256> <name>` of those of its files that have these names."""
    if artifact.is_dir():
        lines = "".join(f"{sha256(artifact / name)} {name}\n" for name in names_in(artifact) if name in names)
        return hashlib.sha256(lines.encode()).hexdigest()
    with artifact.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
