"""The same failure at the same micro-batch on different workers is the job's, and a file takes it again."""

from __future__ import annotations

import ast

from lockstep.attempts.failing_micro_batches import Repeats, repeat
from lockstep.attempts.problems import REPEATED
from lockstep.errors import DeviceError, FailedAt

ECC = DeviceError(
    "a GPU failed in a kernel (step 7, micro-batch 3, rank 1): RuntimeError: CUDA error: unspecified launch failure"
)
PLACE = FailedAt("a GPU failed in a kernel", 7, 3, (12, 5))


def test_the_same_place_on_another_worker() -> None:
    seen = Repeats()
    assert seen.failed(PLACE, ("aaaaaaaaaa", 1), 1) == ""
    assert seen.failed(PLACE, ("bbbbbbbbbb", 0), 2) == (
        "rank 1 on node aaaaaaaa in attempt 1 and rank 0 on node bbbbbbbb in attempt 2"
    )


def test_the_same_worker_another_place_or_another_failure_say_nothing() -> None:
    seen = Repeats()
    assert not seen.failed(PLACE, ("a", 1), 1)
    assert not seen.failed(PLACE, ("a", 1), 2)
    assert not seen.failed(PLACE._replace(step=8), ("b", 1), 3)
    assert not seen.failed(PLACE._replace(micro_batch=4), ("b", 1), 4)
    assert not seen.failed(PLACE._replace(failure="a GPU is gone"), ("b", 1), 5)


def test_the_line_and_the_file_have_all_that_it_takes() -> None:
    found = repeat(ECC, PLACE, "rank 1 on node a in attempt 1 and …", "f00", "/runs", 4)
    assert (found.error.code, found.error.facts["file"]) == (REPEATED.code, found.name)
    assert "\n" not in str(found.error)
    assert "Its samples: 12, 5\n" in found.text
    assert "Replay('f00', '/runs', 4, 7)" in found.text
    ast.parse(found.text)
