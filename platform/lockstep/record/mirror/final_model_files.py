"""The final model of a run, as rank 0 leaves it in the run's folder: a traced graph, and what it takes and returns.

It can be read without torch: the recorder sends it on, and computes nothing with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.files import replaced
from lockstep.parsing import MOST_BYTES, json_document
from lockstep.paths import read_beneath

FOLDER = "model"
DESCRIPTION, EXAMPLE = "model.json", "example.npy"
GRAPH = Path("graph", "model.pt2")
"""In a folder of its own, under the name that MLflow's PyTorch flavor looks for."""


@dataclass(frozen=True, slots=True)
class Values:
    """A tensor that the model takes or returns; -1 in the shape stands for any number of samples."""

    dtype: str
    shape: Sequence[int]


@dataclass(frozen=True, slots=True)
class FinalModel:
    """The content of `model.json`. `error` says why there is no graph, if there is none."""

    input: Values | None = None
    output: Values | None = None
    torch: str = ""
    numpy: str = ""
    error: str = ""

    def write(self, folder: Path) -> Path:
        """Write it to `folder`, whole or not at all. Returns the file."""
        path = folder / DESCRIPTION
        with replaced(path) as aside:
            aside.write_text(json.dumps(asdict(self), indent=2))
        return path

    @classmethod
    def read(cls, folder: Path) -> FinalModel:
        """Read what `write` wrote. OSError or ValueError where it cannot be read."""
        fields = json_document(read_beneath(folder, DESCRIPTION, MOST_BYTES))
        values = {name: Values(**fields.pop(name)) for name in ("input", "output") if fields[name]}
        return cls(**{**fields, **values})


def model_folder(files: Sequence[Path]) -> Path | None:
    """The folder of the final model among the files that a run ends with."""
    return next((path.parent for path in files if path.name == DESCRIPTION), None)
