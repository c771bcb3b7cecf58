"""G5: a loss of power at any moment leaves whole checkpoints alone, the newest that was told of among them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.checkpoint.pruning import clear_leftovers, prune
from lockstep.checkpoint.storage import interface
from lockstep.checkpoint.storage.local import LocalStorage
from tests.power_loss import HOWS, How, Noted
from tests.unit.checkpoint.killed_at_every_call import KEEP, SHARED, complaints, opened, prepared, small
from tests.unit.checkpoint.one_process import newest_good, write_checkpoint
from tests.unit.checkpoint.states import FACTS

COVER = 30
SEEDS = 2


class Case(NamedTuple):
    after: int
    how: How
    seed: int


class Saving:
    """An attempt that begins, saves step 300 and prunes; `first`: in an empty folder, `next`: behind two checkpoints."""

    def __init__(self, folder: Path, scenario: str) -> None:
        self.folder, self.scenario = folder, scenario
        folder.mkdir()
        prepared(folder, scenario)
        self._told = 200 if scenario == "next" else 0
        self.noted = Noted(folder, lambda: self._told)
        with self.noted.watching():
            attempt = opened(LocalStorage(folder), scenario).claim()
            clear_leftovers(attempt)
            write_checkpoint(attempt, 300, small(300), FACTS, SHARED)
            self._told = 300
            prune(attempt, KEEP, whole=300)

    def cases(self) -> list[Case]:
        """All of them, in an order that a seed has chosen."""
        moments = range(self.noted.begun, len(self.noted.calls) + 1)
        found = [Case(at, how, seed) for at in moments for how in HOWS for seed in range(SEEDS)]
        random.Random(16).shuffle(found)
        return found

    def wrong(self, case: Case) -> list[str]:
        """What is wrong with the store after a loss of power, and after the attempt that follows it."""
        self.noted.left(case.after, case.how, random.Random(case.seed)).write(self.folder)
        told: int = self.noted.moments[case.after]
        try:
            if told:
                newest = newest_good(opened(LocalStorage(self.folder), "next"), lambda text: None)
                if newest is None or newest.step < told:
                    return [f"step {told} was told of, and is not there"]
            return complaints(self.folder, self.scenario)
        except Exception as error:  # noqa: BLE001  what it is, the test shows
            return [repr(error)]


def found(saving: Saving, cases: Sequence[Case]) -> dict[Case, list[str]]:
    return {case: wrong for case in cases if (wrong := saving.wrong(case))}


@pytest.fixture(autouse=True)
def several_writes_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PIECE", 1024)


@pytest.mark.parametrize("scenario", ["first", "next"])
def test_some_losses_of_power_leave_a_whole_store(tmp_path: Path, scenario: str) -> None:
    """A few dozen, as a seed has chosen them."""
    saving = Saving(tmp_path / "store", scenario)
    assert found(saving, saving.cases()[: COVER // 2]) == {}


@pytest.mark.exact
@pytest.mark.parametrize("scenario", ["first", "next"])
def test_no_loss_of_power_harms_the_store(tmp_path: Path, scenario: str) -> None:
    """All of them."""
    saving = Saving(tmp_path / "store", scenario)
    cases = saving.cases()
    wrong = found(saving, cases)
    print(f"{len(cases)} losses of power, {len(wrong)} that harm")
    assert wrong == {}


@pytest.mark.parametrize("of", ["folders", "files"])
def test_a_store_that_does_not_flush_is_found(tmp_path: Path, of: str) -> None:
    """The controls: each of the two kinds of flushes is needed."""
    saving = Saving(tmp_path / "store", "next")
    saving.noted.forget_flushes(of_folders=of == "folders")
    last = len(saving.noted.calls)
    assert found(saving, [Case(last, how, 0) for how in ("dropped", "names", "zeros")])
