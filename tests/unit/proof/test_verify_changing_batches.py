"""Runs whose steps differ in size are verified as others are: sizes that rise, micro-batches that tokens bound, micro-batches of like lengths."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from lockstep import train
from lockstep.calls.verify import verify
from lockstep.proof.verification import Verified
from tests.distributed.changing_jobs import by_tokens, by_windows, ramp
from tests.distributed.training import Document

DOCUMENTS = {"ramp": ramp, "tokens": by_tokens, "windows": by_windows}


def recorded(name: str, storage: Path) -> Path:
    """The folder of such a run, with digests of every step and a checkpoint after every fourth."""
    document: Document = DOCUMENTS[name](
        checkpoint={"storage": str(storage), "every": {"steps": 4}, "keep_last": 9},
        record={"uri": "off", "digest_every": 1},
    )
    return Path(train(document, local=True).folder)


def verified(run: Path, **options: Any) -> Verified:
    return verify(run.name, uri="off", storage=run.parent, local=True, **options)


def without_last_row(run: Path) -> int:
    """Cut the last step out of the ledger, as somebody would who hides it; the step."""
    table = pq.read_table(run / "ledger.parquet")
    last: int = pc.max(table["step"]).as_py()
    pq.write_table(table.filter(pc.less(table["step"], last)), run / "ledger.parquet")
    return last


def with_other_gradient(run: Path, step: int) -> None:
    """Change one bit of the digest of the last micro-batch's gradient of a step."""
    table = pq.read_table(run / "ledger.parquet")
    at = table.column_names.index("gradient_digests")
    rows = table["gradient_digests"].to_pylist()
    rows[step - 1][-1] ^= 1
    changed = table.set_column(at, "gradient_digests", pa.array(rows, table.schema.field(at).type))
    pq.write_table(changed, run / "ledger.parquet")


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_step_is_the_same_again_and_what_is_changed_is_found(name: str, tmp_path: Path) -> None:
    run = recorded(name, tmp_path)
    found = verified(run, all_steps=True)
    assert found.same and found.same_bits and found.cause is None
    steps = pq.read_table(run / "ledger.parquet")
    assert found.steps == steps.num_rows and len(set(steps["samples"].to_pylist())) > 1

    later = verified(run, from_step=6)
    assert later.same and later.spans[0].start == 4, (
        "from the checkpoint before it, in the middle of an epoch"
    )

    gradients = Path(shutil.copytree(run, tmp_path / "gradients" / run.name))
    micro_batch = len(steps["gradient_digests"].to_pylist()[5]) - 1
    with_other_gradient(gradients, 6)
    difference = verified(gradients, from_step=6).first_difference
    assert difference is not None and difference[:3] == (6, micro_batch, "gradient_digest")

    last = without_last_row(run)
    difference = verified(run).first_difference
    assert difference is not None and difference[:3] == (last, None, "row"), (
        "the plan knows how many steps it has"
    )
