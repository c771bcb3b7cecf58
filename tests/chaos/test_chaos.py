"""Kills in one run on several nodes, of a raylet and of the driver; and a job that does not survive one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import disturbed_sweep
from tests.chaos.disturbed import WEIGHTS, wrong_end
from tests.chaos.ways import MOST, shared_out

ROOT = Path(__file__).parents[2]


def chaos(runs: str, *more: str, module: str = "disturbed") -> list[str]:
    """In a process of its own: Ray adds nodes on the main thread alone, and reads its settings from the environment."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.chaos.{module}", "--runs", runs, *more],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.exact  # two minutes; tests/cluster/test_shared_folders.py kills a node in the default run
@pytest.mark.parametrize("killed", ["node", "node+driver"])
def test_what_is_killed_leaves_the_bits_as_they_are(killed: str) -> None:
    """G1 and G4: digest, ledger, evaluations and MLflow's histories, each step once, are those of the run left alone."""
    *_, run, verdict = chaos(f"brief={killed}", "--nodes", "2")
    count = len(killed.split("+"))
    assert run.startswith(f"run 0 brief: {count} disturbances")
    assert run.endswith("the same")
    assert verdict == f"{count} disturbances; runs that did not end as they must: none"


@pytest.mark.exact  # minutes
def test_what_else_happens_leaves_the_bits_as_they_are() -> None:
    """Each kind of fault once, in two runs."""
    kinds = [kind for kind in WEIGHTS if kind not in {"worker", "node", "driver", "recorder"}]
    half = len(kinds) // 2
    *_, verdict = chaos(f"digits={'+'.join(kinds[:half])},digits={'+'.join(kinds[half:])}")
    assert verdict == f"{len(kinds)} disturbances; runs that did not end as they must: none"


@pytest.mark.exact  # minutes
def test_a_run_that_kills_by_itself_keeps_its_bits() -> None:
    """`--chaos`, as a user tries a set-up with it: a worker, the recorder and the driver, which is resumed with it."""
    *_, run, verdict = chaos("digits=worker:0.02+recorder:0.01+driver:0.01")
    assert run.endswith("the same")
    assert int(verdict.partition(" disturbances; ")[0]) >= 3
    assert verdict.endswith("runs that did not end as they must: none")


@pytest.mark.exact  # a minute
def test_what_a_recovery_drops_shows() -> None:
    """The negative control: an optimizer whose memory is in no checkpoint. Workers that outlive another keep theirs; none outlives the driver."""
    *_, run, verdict = chaos("forgetful=driver")
    assert "OTHER weights_digest, violation, columns, evaluations, histories" in run
    assert verdict == "1 disturbances; runs that did not end as they must: none"


@pytest.mark.exact  # minutes each
@pytest.mark.parametrize(("name", "first"), [("random", 0), ("optuna", 1)])
def test_what_happens_to_a_sweep_leaves_its_trials_as_they_are(name: str, first: int) -> None:
    """Each kind of fault once, in one of two sweeps: trials, curves, digests and the best are those of the sweep left alone."""
    kinds = list(disturbed_sweep.WEIGHTS)[first::2]
    *_, verdict = chaos(f"{name}={'+'.join(kinds)}", module="disturbed_sweep")
    assert verdict.endswith("sweeps that did not end as they must: none")


def test_as_much_happens_as_is_wanted() -> None:
    assert shared_out(2 * MOST + 1, ("a", "b")) == f"a={MOST},b={MOST},a=1"


@pytest.mark.parametrize(
    ("from_steps", "in_memory", "other", "why"),
    [
        ([0, 25], False, ["weights_digest"], ""),
        ([0, 25], False, [], "a control that shows nothing"),
        ([0, 0], False, [], "a control that can show nothing"),
        ([0, 30], True, [], "a control that can show nothing"),
        ([0], False, ["weights_digest"], "a control that can show nothing"),
    ],
)
def test_a_control_passes_only_where_it_forgot_something_and_that_shows(
    from_steps: list[int], in_memory: bool, other: list[str], why: str
) -> None:
    """One that lost nothing, or began anew, is an error and no pass."""
    account = [{"from_step": step, "in_memory": in_memory} for step in from_steps]
    assert wrong_end(account, other, control=True).startswith(why)
    assert bool(wrong_end(account, other, control=True)) == bool(why)
    assert bool(wrong_end(account, other, control=False)) == bool(other)
