from __future__ import annotations

import torch

from jobs.digits.job import digits, part
from tests.untraced_jobs import read


def test_the_file_holds_the_digits_that_the_job_trains_on() -> None:
    """So that what is shown with the one is shown of the other."""
    for held_out in (False, True):
        for ours, theirs in zip(part(*read(), held_out=held_out), digits(held_out=held_out), strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
