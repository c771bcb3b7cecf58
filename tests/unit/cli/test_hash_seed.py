"""Strings are hashed alike in every run, whatever the user has set: the command starts over, as it does where nothing is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

COMMAND = """
import os, sys
sys.argv = ["lockstep", "train", "none.yaml", "--local"]
def told(program, words):
    print(os.environ["PYTHONHASHSEED"], os.environ["ONEDNN_MAX_CPU_ISA"], *words[1:])
    raise SystemExit
os.execv = told
from lockstep.cli.entry import run
run()
"""


def started(seed: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    given = {} if seed is None else {"PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", COMMAND],
        env={**environment, **given, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(ROOT / "platform")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [None, "random", "1", "42"])
def test_a_seed_that_the_user_has_set_is_replaced(seed: str | None) -> None:
    assert started(seed).stdout == "0 AVX2 -P -m lockstep train none.yaml --local\n"


def test_a_command_that_has_it_does_not_start_over() -> None:
    done = started("0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "none.yaml" in done.stderr
