"""A recorded run whose steps have phases, taken again: what was planted in one of them is found, and each is shown by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lockstep import Loss, Phase, train
from lockstep.calls.replay_call import replay
from lockstep.calls.verify import verify
from lockstep.proof.operator_trace import Look, ObservedValue, parting
from tests.distributed.kinds import document
from tests.distributed.phase_kinds import Gan
from tests.unit.proof.test_verify import first
from tests.unit.proof.verified_jobs import PLANTED, Flip

STEP = 2


class Pair(Gan):
    """A bit of a gradient may be flipped in the phase of the maker, and in its phase alone."""

    def phases(self) -> Sequence[Phase]:
        judge, maker = super().phases()
        return [judge, Phase("maker", maker.loss, maker.parameters, maker.optimizer)]

    def made(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().made(model, batch)
        return Loss(Flip.apply(loss.total.view(1, 1)).sum(), loss.weight, loss.parts)  # type: ignore[no-untyped-call]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    storage = {"storage": str(tmp_path), "every": {"steps": 1}, "keep_last": 3}
    record = {"uri": "off", "digest_every": 1}
    spec = document(Pair, rehearsal="off", record=record, checkpoint=storage)
    PLANTED.clear()
    yield Path(train(spec, local=True).folder)
    PLANTED.clear()


@pytest.mark.scenario
def test_a_step_of_phases_is_verified_and_shown(recorded: Path, tmp_path: Path) -> None:
    where: Any = {"uri": "off", "storage": recorded.parent}
    assert verify(recorded.name, all_steps=True, local=True, **where).same
    shown = replay(recorded.name, STEP, inspect=True, folder=tmp_path / "out", **where)
    assert shown.difference == ""
    seats = [(one["micro_batch"], one["phase"]) for one in shown.micro_batches]
    assert seats == [(m, phase) for m in range(4) for phase in ("judge", "maker")]
    alone = replay(recorded.name, STEP, micro_batch=1, folder=tmp_path / "one", **where)
    assert [Path(file).name for file in alone.files].count("batch.safetensors") == 1
    assert [one["phase"] for one in alone.micro_batches] == ["judge", "maker"]
    for one in shown.micro_batches:
        assert {seen["what"].split(".")[0] for seen in one["gradients"]} == {f"gradient of {one['phase']}"}

    PLANTED["gradient"] = (STEP - 1, 1, "maker")
    assert first(verify(recorded.name, from_step=STEP, local=True, **where)) == (STEP, 1, "gradient_digest")


def test_what_parts_in_a_later_phase_is_found_behind_the_phases_before_it() -> None:
    def look(*gradients: int) -> Look:
        found = [ObservedValue("gradient of a", "a", "backward", digest, {}) for digest in gradients]
        return Look(modules=[ObservedValue("output of a", "a", "forward", gradients[0], {})], gradients=found)

    one, other, same = look(1), look(1), look(1)
    one.later, other.later = [same, look(2, 3)], [same, look(2, 4)]
    found = parting(one, other)
    assert found is not None
    assert (found.quantity, found.parameter) == ("gradient of a", "a")
    assert parting(one, Look.of(json.loads(json.dumps(asdict(one))))) is None
