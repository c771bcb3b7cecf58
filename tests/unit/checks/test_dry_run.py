"""A dry run tells what is shared out."""

from __future__ import annotations

from lockstep.checks.dry_run import as_text, dry_run
from lockstep.spec.loading import load_spec


def test_a_sharded_optimizer_is_told() -> None:
    document = {"job": {"use": "tests.distributed.small_jobs:Plain"}, "batch": {"global": 16}}
    line = "sharding          of W workers each keeps 1/W of the optimizer's state, and the bits are the same"
    assert line in as_text(dry_run(load_spec(document, ["sharding=optimizer"]))).splitlines()
    assert line not in as_text(dry_run(load_spec(document))).splitlines()
