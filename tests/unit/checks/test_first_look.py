"""What a machine fails at while the command looks at a job, before the first attempt, is left to the attempts: they are tried again."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from lockstep.attempts.retry_policy import outcome_of
from lockstep.checks.start_checks import check_job
from lockstep.errors import JobError, LockstepError
from lockstep.job.loading import load_job
from lockstep.spec.loading import load_spec
from lockstep.training.failure import as_lockstep_error
from tests.untraced_jobs import UntracedDigits

FAULTS: dict[str, Exception] = {
    "eio": OSError(errno.EIO, os.strerror(errno.EIO), "/data/images.npy"),
    "stale": OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    "ecc": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    "peer": RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:65164"),
    "job": ValueError("the labels are no numbers"),
}


class Looking(UntracedDigits):
    """Reads its first samples as it is made."""

    class Params(UntracedDigits.Params):
        fault: str

    params: Params

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        raise FAULTS[params.fault]


def looking(fault: str) -> Any:
    return load_spec({"job": {"use": f"{__name__}:Looking", "params": {"width": 4, "fault": fault}}})


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "job"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_fault_that_may_pass_ends_no_command_before_its_first_attempt(fault: str, elsewhere: bool) -> None:
    """The worker that meets it a second later has the same error, and an attempt that ends with it is followed by another."""
    spec = looking(fault)
    check_job(spec, elsewhere=elsewhere)
    with pytest.raises(LockstepError) as error:
        load_job(spec.job.use, spec.job.params)
    met = as_lockstep_error(error.value, "rank 0")
    assert outcome_of(met) in ("worker lost", "storage"), met


def test_a_mistake_of_the_job_ends_it_there() -> None:
    with pytest.raises(JobError, match="the labels are no numbers"):
        check_job(looking("job"), elsewhere=True)
