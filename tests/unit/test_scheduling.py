"""A process of tests that ends costs the test that ended it, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests.scheduling import Together

def pytest_xdist_make_scheduler(config, log):
    return Together(config, log)
"""

TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("i", range(3))
def test_it(i):
    time.sleep(0.02)
    if {ends} and i == 1:
        os._exit(1)
"""


def test_the_others_are_run_where_a_process_ends(tmp_path: Path) -> None:
    """xdist's own scheduling waits for ever here: of the nine files some are done when the process ends."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(9):
        (tmp_path / f"test_{number}.py").write_text(TESTS.format(ends=number == 5))
    words = ["-q", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "1 failed, 26 passed" in done.stdout, done.stdout + done.stderr
    assert "test_5.py::test_it[1]" in done.stdout
