"""A folder to start from: a small job that trains as it is, its spec, and the schema of specs beside it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

from lockstep.calls import problems
from lockstep.errors import SpecError
from lockstep.spec.schema import spec_schema

_STARTERS = Path(__file__).parent / "starters"

KINDS = ("classifier", "gpt")
"""The jobs that there are to start from."""

SCHEMA_FILE = "spec.schema.json"


def init(folder: str | Path, kind: str = KINDS[0]) -> list[Path]:
    """Write a job of this kind and its spec into a new folder, which appears whole or not at all; the files that were written.

    SpecError where something of this name exists or the folder above it does not; StorageError where it cannot be written.
    """
    if kind not in KINDS:
        raise problems.STARTER_KIND(got=kind, wanted=" or ".join(KINDS))
    if folder == "":
        raise problems.NO_NAME()
    target = Path(folder).absolute()
    if os.path.lexists(target):
        raise _exists(folder)
    if not target.parent.is_dir():
        raise problems.NO_PARENT(folder=target.parent, got=target.name)
    if "\\" in target.name or not target.name.isprintable():
        raise problems.STARTER_NAME(got=target.name)
    texts = _texts(kind, target.name)
    aside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        aside.mkdir()
        for name, text in texts.items():
            Path(aside, name).write_text(text, encoding="utf-8")
        os.rename(aside, target)  # noqa: PTH104 - takes no folder's place but an empty one's, and no file's
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise _exists(folder) from error
        raise problems.STARTER_UNWRITABLE(folder=folder, got=error.strerror) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already where all went well
    return [target / name for name in texts]


def _texts(kind: str, name: str) -> dict[str, str]:
    """The files by their names."""

    def starter(path: str) -> str:
        return Path(_STARTERS, path).read_text(encoding="utf-8")

    quoted = json.dumps(name, ensure_ascii=False)  # text in YAML, whatever the name is
    return {
        "README.md": starter("README.md").replace("NAME", name),
        "job.py": starter(f"{kind}/job.py"),
        "train.yaml": starter(f"{kind}/train.yaml").replace("NAME", quoted),
        SCHEMA_FILE: json.dumps(spec_schema(), indent=2) + "\n",
        ".gitignore": "runs/\nmlartifacts/\nmlflow.db*\n__pycache__/\n",
    }


def _exists(folder: str | Path) -> SpecError:
    return problems.STARTER_EXISTS(got=folder)
