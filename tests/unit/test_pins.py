"""What is installed is pinned, and held against the hashes of PyPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import ROOT

LOCKS = ("train", "test", "supply", "docs")


def pins(path: Path) -> dict[str, str]:
    """Version by normal name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\n\\]+)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_hashes(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    packages = re.split(r"\n(?=[A-Za-z0-9])", text.strip())
    assert len(packages) == len(re.findall(r"^[\w.-]+==", text, re.MULTILINE)) > 15
    for package in packages:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), package.split()[0]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_the_versions_of_the_constraints(name: str) -> None:
    """`make lock` writes it anew."""
    constraints = pins(ROOT / "constraints.txt")
    locked = pins(ROOT / "requirements" / f"{name}.txt")
    assert {p: v for p, v in locked.items() if p in constraints and constraints[p] != v} == {}
    if name in ("train", "test"):
        assert "torch" not in locked and not any(p.startswith(("nvidia-cu", "triton")) for p in locked)


def test_the_tests_have_what_training_has() -> None:
    train, test = (pins(ROOT / "requirements" / f"{name}.txt") for name in ("train", "test"))
    assert train.items() <= test.items()
