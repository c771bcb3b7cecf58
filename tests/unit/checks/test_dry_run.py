"""A dry run tells what is shared out."""

from __future__ import annotations

from lockstep.checks.dry_run import as_text, dry_run
from lockstep.spec.loading import load_spec


def test_a_sharded_optimizer_is_told() -> None:
    document = {"job": {"use": "tests.distributed.small_jobs:Plain"}, "batch": {"global": 16}}
    line = "sharding          of W workers each keeps 1/W of the optimizer's state, and the bits are the same"
    assert line in as_text(dry_run(load_spec(document, ["sharding=optimizer"]))).splitlines()
    assert line not in as_text(dry_run(load_spec(document))).splitlines()


def test_the_units_of_a_sharded_model_are_told() -> None:
    document = {"job": {"use": "tests.distributed.small_jobs:Plain"}, "batch": {"global": 16}}
    told = as_text(dry_run(load_spec(document, ["sharding=full"]))).splitlines()
    line = "units             the blocks that the model repeats: gathered 1 ahead, and again for its backward"
    assert line in told
    assert (
        "memory            `lockstep estimate` measures it, what a step sends, and how many units fit" in told
    )
    rows = "rows              in host memory, and copied to the device to compute with them"
    assert rows not in told
    offloaded = dry_run(load_spec(document, ["sharding={mode: full, offload: true}"]))
    assert rows in as_text(offloaded).splitlines()
    named = {"mode": "full", "units": ["layers.*", "head"], "prefetch": 0, "reshard_after_forward": False}
    told = as_text(dry_run(load_spec({**document, "sharding": named}))).splitlines()
    assert "units             layers.*, head: gathered 0 ahead, and kept until its backward" in told
