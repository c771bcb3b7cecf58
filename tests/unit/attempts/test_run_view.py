"""Which of several workers' errors an attempt is told by, and whose devices failed."""

from __future__ import annotations

import pytest

from lockstep.driver.run_view import RunView
from lockstep.errors import ClusterError, DeviceError, JobError, LockstepError
from lockstep.record.events.union import Broke

PEER, DEVICE, JOB = ClusterError("a peer is gone"), DeviceError("ECC"), JobError("a label")


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ([PEER, DEVICE], DEVICE),
        ([DEVICE, PEER], DEVICE),
        ([PEER, JOB], JOB),
        ([DEVICE, JOB], DEVICE),
        ([JOB, DEVICE], JOB),
    ],
)
def test_the_first_error_counts_unless_it_is_the_consequence_of_another(
    told: list[LockstepError], counts: LockstepError
) -> None:
    view = RunView(2)
    for rank, error in enumerate(told):
        view.take(Broke(error, "", rank))
    assert view.error is counts
    assert view.device_ranks == {rank for rank, error in enumerate(told) if error is DEVICE}
    assert view.next(3).device_ranks == set()
