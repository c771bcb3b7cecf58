"""Which groups outlive the loss of a member: all but those that docs/attempts.md names under "Where it cannot be done"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, Replay
from lockstep.communication.group import Group
from lockstep.spec.loading import load_spec
from lockstep.training.elastic.recovery import can_recover

PAGE = Path(__file__).parents[4] / "docs" / "attempts.md"
ROOT = Path(__file__).parents[4]

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLAIN: Mapping[str, Any] = {"job": {"use": "tests.distributed.small_jobs:Plain"}}
REPLAYED = AttemptOrigin(replay=Replay("a" * 32, "/runs", 0, 3))

KNOWN_BEFORE: dict[str, tuple[Mapping[str, Any], torch.device, AttemptOrigin | None]] = {
    "on GPUs": ({}, GPU, AttemptOrigin()),
    "`sharding: optimizer` or `full` without [`faults.mirror`](#sharded-state)": (
        {"sharding": "full"},
        CPU,
        AttemptOrigin(),
    ),
    "`reduction: native`": ({"reduction": "native"}, CPU, AttemptOrigin()),
    "steps that are taken again to be [compared](verify.md)": ({}, CPU, REPLAYED),
}
"""What is known as a worker begins to train, by the row of the page: the spec, the device and the origin."""

SHOWN_LATER = {
    "a worker that is lost together with its mirror": "tests/distributed/test_mirrors.py",
    "fewer workers are left than `workers.min`, or none": "tests/unit/training/elastic/test_membership.py",
    "a worker ended with an error of its own: the job's, a device's, a disk's": "tests/distributed/test_survivors.py",
    "a worker is lost before all of them train": "tests/unit/training/elastic/test_membership.py",
    "a step fails a second time though no worker is lost": "tests/unit/training/elastic/test_membership.py",
    "rank 0 of a [sweep](sweeps.md)'s trial": "tests/cluster/test_sweep.py",
}
"""What shows itself when a worker is lost, and the tests that have it."""


def recovers(spec: Mapping[str, Any], device: torch.device, origin: AttemptOrigin | None) -> bool:
    """Whether a worker of such a run comes to a rendezvous."""
    loaded = load_spec({**PLAIN, "batch": {"global": 8, "micro": 2}, **spec})
    return can_recover(loaded, Group(0, 1, device), origin)


def rows() -> list[str]:
    """The cases of the page's table."""
    section = PAGE.read_text().partition("### Where it cannot be done")[2].partition("\n## ")[0]
    cells = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return cells[2:]


def test_each_case_of_the_page_is_tried_here_or_elsewhere() -> None:
    assert sorted(rows()) == sorted([*KNOWN_BEFORE, *SHOWN_LATER])
    assert all((ROOT / file).is_file() for file in SHOWN_LATER.values())


@pytest.mark.parametrize("case", KNOWN_BEFORE)
def test_where_it_cannot_be_done_no_worker_says_that_it_would_come(case: str) -> None:
    """A worker that said so would be waited for, and the run would go on with other bits, or hang."""
    assert not recovers(*KNOWN_BEFORE[case])


@pytest.mark.parametrize("mirror", [True, False])
@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_what_is_sharded_is_outlived_where_it_is_mirrored(sharding: str, mirror: bool) -> None:
    assert recovers({"sharding": sharding, "faults": {"mirror": mirror}}, CPU, AttemptOrigin()) == mirror


def test_a_torch_whose_sharding_cannot_be_taken_off_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the parts of FSDP2 that this needs, the table of modules is torch's own."""
    monkeypatch.delattr("torch.distributed._composable_state._module_state_mapping")
    assert not recovers({"sharding": "full", "faults": {"mirror": True}}, CPU, AttemptOrigin())
    assert recovers({"sharding": "optimizer", "faults": {"mirror": True}}, CPU, AttemptOrigin())


@pytest.mark.parametrize("origin", [None, AttemptOrigin(), AttemptOrigin("a" * 32, 2)])
def test_any_other_run_goes_on_in_memory(origin: AttemptOrigin | None) -> None:
    """The control: on the CPU, with a whole optimizer, the exact reduction and one loss."""
    assert recovers({}, CPU, origin)
