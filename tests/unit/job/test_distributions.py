"""Which distribution has installed a module, by the folder that it lies in."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import yaml

from lockstep.job.frames import is_of_the_job
from lockstep.job.inputs.distributions import distribution_of

INSTALLED = {
    "acme_core-1.0.dist-info/RECORD": "acme/core/__init__.py,sha256=x,1\nacme_core-1.0.dist-info/METADATA,,\n",
    "acme_data-2.1.dist-info/RECORD": "acme/data/__init__.py,sha256=x,1\n",
    "Odd.Name-3.0.dist-info/top_level.txt": "oddly\n",
    "acme/core/__init__.py": "",
    "acme/data/__init__.py": "",
    "oddly.py": "",
    "mine.py": "",
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder of `pip install --target`, with a module of the user's own in it."""
    for path, text in INSTALLED.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_a_module_comes_from_the_distribution_that_has_its_file(target: Path) -> None:
    """Also where two share a namespace, and where the names are not alike."""
    paths = ("acme/core/__init__.py", "acme/data/__init__.py", "oddly.py")
    found = [distribution_of(target / path) for path in paths]
    assert [(one.name, one.version) for one in found if one is not None] == [
        ("acme-core", "1.0"), ("acme-data", "2.1"), ("odd-name", "3.0"),
    ]  # fmt: skip
    assert not any(is_of_the_job(str(target / path)) for path in paths)


def test_what_no_distribution_has_installed_is_the_jobs(target: Path) -> None:
    assert distribution_of(target / "mine.py") is None
    assert is_of_the_job(str(target / "mine.py"))


def test_an_upgrade_is_seen_in_the_same_process(target: Path) -> None:
    (target / "Odd.Name-3.0.dist-info").rename(target / "Odd.Name-3.1.dist-info")
    found = distribution_of(target / "oddly.py")
    assert found is not None
    assert found.version == "3.1"


def test_real_ones_are_found() -> None:
    for module, name in ((numpy, "numpy"), (yaml, "pyyaml")):
        found = distribution_of(Path(module.__file__))
        assert found is not None
        assert (found.name, found.version) == (name, module.__version__)
