"""The package's face: its names come when they are asked for, and `import lockstep` costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

PLATFORM = Path(__file__).parents[2] / "platform"


def test_every_name_of_the_face_is_there() -> None:
    assert all(getattr(lockstep, name) is not None for name in lockstep.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        lockstep.trian  # noqa: B018


def test_train_stays_a_function_whatever_is_imported() -> None:
    """A submodule of the same name would replace it as soon as anything imports that."""
    import lockstep.training.loop

    assert callable(lockstep.train)
    assert callable(lockstep.train)


@pytest.mark.parametrize(
    "module", ["lockstep", "lockstep.spec", "lockstep.record.recorder", "lockstep.cli.main"]
)
def test_importing_is_cheap(module: str) -> None:
    """Neither ray nor mlflow nor torch is imported before it is used."""
    heavy = "{'ray', 'mlflow', 'torch', 'pyarrow'}"
    code = f"import sys; sys.path.insert(0, {str(PLATFORM)!r}); import {module}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
