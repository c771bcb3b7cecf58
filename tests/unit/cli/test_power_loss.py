"""G1, G4, G5, G6: a run whose machine loses its power at any moment is resumed by its id to the uninterrupted run's bits."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lockstep import calls, resume, train
from lockstep.errors import LockstepError, NoSuchRunError
from lockstep.record.ledger import segments
from lockstep.record.ledger.tables import DETERMINISTIC, read_evaluations, read_parquet
from tests.distributed.training import bits
from tests.power_loss import HOWS, How, Noted
from tests.unit.record.failed_at_every_call import quick

STEPS = 8
SEED = 16


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    """Segments of three steps, several of which are full while the run lasts."""
    with quick(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(segments, "SEGMENT_STEPS", 3)
        # It tries a file of `tempfile`, which keeps calls of its own.
        patched.setattr(calls.train, "check_storage", lambda spec: None)
        yield


class Case(NamedTuple):
    after: int
    how: How
    seed: int


def document(folder: Path) -> dict[str, Any]:
    return {
        "job": {"use": "tests.distributed.small_jobs:Plain"},
        "length": {"steps": STEPS},
        "batch": {"global": 8, "micro": 4},
        "record": {"uri": "off"},
        "checkpoint": {"storage": str(folder), "every": {"steps": 2}, "keep_last": 1},
    }


class Came(NamedTuple):
    """What a run came to, as bits."""

    weights_digest: Any
    ledger: Any
    evaluations: Any
    weights: bytes
    status: str


def came_to(folder: Path, run_id: str, digest: Any) -> Came:
    run = folder / run_id
    rows = read_parquet(run / "ledger.parquet")
    evaluations = run / "evaluations.parquet"
    return Came(
        digest,
        [bits({name: getattr(row, name) for name in DETERMINISTIC}) for row in rows],
        [(one.step, bits(one.metrics)) for one in read_evaluations(evaluations)]
        if evaluations.exists()
        else [],
        (run / "weights" / "final.safetensors").read_bytes(),
        json.loads((run / "run.json").read_text())["status"],
    )


class Running:
    """A run of eight steps in `folder`, which saves after each second one, and the calls that it made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.told = ""
        """The run's id, from when it was told on."""
        self.noted = Noted(folder, lambda: self.told)
        with self.noted.watching():
            result = train(document(folder), local=True, on_run_id=self._tell)
        self.run_id = result.run_id
        self.whole = came_to(folder, self.run_id, result.weights_digest)
        assert self.whole.status == "FINISHED" and len(self.whole.ledger) == STEPS

    def _tell(self, run_id: str) -> None:
        self.told = run_id

    def cases(self) -> list[Case]:
        """All of them, in an order that a seed has chosen."""
        found = [
            Case(at, how, 0) for at in range(self.noted.begun, len(self.noted.calls) + 1) for how in HOWS
        ]
        random.Random(SEED).shuffle(found)
        return found

    def began(self) -> int:
        """After how many calls the run can be gone on with."""
        names = [{name for _, name in call.keys} for call in self.noted.calls]
        return next(at for at, made in enumerate(names) if "spec.yaml" in made)

    def wrong(self, case: Case) -> list[str]:
        """What a resume after the loss of power has of other bits than the uninterrupted run."""
        self.noted.left(case.after, case.how, random.Random(case.seed)).write(self.folder)
        try:
            result = resume(self.run_id, [f"checkpoint.storage={self.folder}"], local=True, uri="off")
        except NoSuchRunError as error:  # of a run that nobody had been told of
            return [] if not self.noted.moments[case.after] else [str(error)]
        except LockstepError as error:
            return [str(error)]
        found = came_to(self.folder, self.run_id, result.weights_digest)
        return [
            name for name, one, other in zip(Came._fields, found, self.whole, strict=True) if one != other
        ]


def found(running: Running, cases: Sequence[Case]) -> dict[Case, list[str]]:
    return {case: wrong for case in cases if (wrong := running.wrong(case))}


@pytest.mark.scenario
def test_a_run_goes_on_after_some_losses_of_power(tmp_path: Path) -> None:
    """Some, as a seed has chosen them; and that the comparison sees a folder that is not flushed."""
    running = Running(tmp_path / "runs")
    assert found(running, [Case(at, "kept", 0) for at in range(running.noted.begun, running.began())]) == {}
    assert found(running, running.cases()[:3]) == {}
    running.noted.forget_flushes(of_folders=False)
    assert found(running, [Case(len(running.noted.calls), "zeros", 0)])


@pytest.mark.exact
def test_a_run_goes_on_after_any_loss_of_power(tmp_path: Path) -> None:
    """Five hundred of them."""
    running = Running(tmp_path / "runs")
    cases = running.cases()[:500]
    wrong = found(running, cases)
    print(f"{len(cases)} of {len(running.cases())} losses of power, {len(wrong)} lies")
    assert wrong == {}
