"""A dry run tells what is shared out."""

from __future__ import annotations

from lockstep.checks.dry_run import as_text, dry_run
from lockstep.spec.loading import load_spec


def test_a_sharded_optimizer_is_told() -> None:
    document = {"job": {"use": "tests.distributed.small_jobs:Plain"}, "batch": {"global": 16}}
    line = "optimizer         sharded: of W workers each keeps 1/W of its state, and the bits are the same"
    assert line in as_text(dry_run(load_spec(document, ["optimizer.sharded=true"]))).splitlines()
    assert line not in as_text(dry_run(load_spec(document))).splitlines()
