"""What Ray says of a process that is gone, in one line."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.train.v2.api.exceptions import ControllerError

from lockstep.attempts import problems
from lockstep.attempts.worker_group import ended_by, names_lost, why_lost
from lockstep.errors import Problem

DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: RayTrainWorker\nWorker exit type: SYSTEM_ERROR "
    "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: …"
)

WITHOUT_A_WORD = (
    "Worker unexpectedly exits with a connection error code 2: it was killed from outside or crashed; where the kernel's "
    "out-of-memory killer did it, dmesg on its node says so"
)


def said(error: Exception, workers: int) -> str:
    return str(ended_by(error, workers))


class Failed(Exception):
    """As Ray Train's: the error of each rank that failed."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__("training failed")
        self.worker_failures = failures


class HealthCheckFailed(Exception):
    """As Ray Train's, which is private: two lines, and the failure itself. A killed machine gives the real one (tests/cluster/test_lost_machines.py)."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(f"A worker health check failed.\n{failure}")
        self.health_check_failure = failure


@pytest.mark.parametrize(
    ("error", "problem", "facts"),
    [
        (Failed({1: RuntimeError(DIED)}), problems.RANK_LOST, {"rank": "1", "workers": "2"}),
        (Failed({0: RuntimeError("OutOfMemoryError: the node was running low on memory")}), problems.NODE_MEMORY, {"rank": "0"}),
        (ControllerError(RuntimeError(DIED)), problems.LOST_AT_START, {"workers": "2"}),
        (ControllerError(ValueError("no such thing")), problems.ATTEMPT_ENDED, {"got": "ValueError: no such thing"}),
    ],
)  # fmt: skip
def test_what_ended_an_attempt_is_a_problem(
    error: Exception, problem: Problem[Any], facts: dict[str, str]
) -> None:
    ended = ended_by(error, 2)
    assert ended.code == problem.code
    assert facts.items() <= ended.facts.items()


def test_the_ranks_and_the_cause_are_named() -> None:
    assert said(Failed({1: RuntimeError(DIED)}), 2) == (f"rank 1 of 2 was lost: {WITHOUT_A_WORD}")
    told = said(
        Failed({0: RuntimeError("OutOfMemoryError: Task was killed due to the node running low on memory")}),
        4,
    )
    assert told.startswith("rank 0 of 4 was killed: its node ran out of memory; lower data.loader_processes")
    assert said(ValueError("first\nsecond"), 3) == "the attempt on 3 workers ended: ValueError: first"


def test_a_worker_that_is_lost_before_it_trains_is_told_as_such() -> None:
    """Ray tells it as a failure of its controller, whose first line ends with a colon."""
    starting = RuntimeError("One of the worker actors failed to initialize due to error:\nTraceback …")
    starting.__cause__ = RuntimeError(DIED)
    assert said(ControllerError(starting), 2) == (
        f"one of 2 workers was lost as it was started: {WITHOUT_A_WORD}"
    )
    told = said(ControllerError(ValueError("no such thing")), 2)
    assert told == "the attempt on 2 workers ended: ValueError: no such thing"


def test_a_process_of_which_little_is_known_is_told_in_one_line() -> None:
    assert why_lost(DIED) == WITHOUT_A_WORD
    detail = "Worker exit detail: The node 1.2.3.4 was terminated. Its heartbeats stopped."
    assert why_lost(f"gone\n{detail}\nmore") == "The node 1.2.3.4 was terminated. Its heartbeats stopped"
    assert why_lost("gone\nfor good") == "gone"
    node = "The actor died because its node has died. Node Id: 5c1f\n\tthe actor's node was terminated unexpectedly"
    assert why_lost(f"gone\n\tclass_name: Mailbox\n{node}") == "its node has died. Node Id: 5c1f"
    never = "The actor is dead because its worker process has died.\nThe actor never ran"
    assert why_lost(f"gone\n{never}") == "its worker process has died"
    assert why_lost("") == "no message"


@pytest.mark.parametrize("detail", ["", " ", "  \n", " \nThe actor never ran"])
def test_a_process_that_ended_without_a_detail_has_a_reason_all_the_same(detail: str) -> None:
    """As Ray tells of one that was killed before it had said anything."""
    text = f"gone\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail:{detail}"
    assert why_lost(text) == "its worker process has died"
    assert said(Failed({0: RuntimeError(text)}), 2) == "rank 0 of 2 was lost: its worker process has died"
    assert why_lost(f"Worker exit type: SYSTEM_ERROR Worker exit detail:{detail}") != ""


def test_a_worker_that_does_not_answer_has_the_reason_that_ray_knows() -> None:
    cut = ActorUnavailableError("RpcError: Connection reset by peer rpc_code: 14", b"x" * 16)
    error = HealthCheckFailed(cut)
    told = "its process cannot be reached (RpcError: Connection reset by peer rpc_code: 14)"
    assert said(Failed({2: error}), 3) == f"rank 2 of 3 was lost: {told}"
    assert names_lost(Failed({2: error}))
    died = HealthCheckFailed(ActorDiedError())
    assert said(Failed({0: died}), 3) == (
        "rank 0 of 3 was lost: The actor died unexpectedly before finishing this task."
    )


def test_whoever_met_the_loss_of_another_is_not_told_as_lost() -> None:
    peer = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:65164")
    error = Failed({0: peer, 1: RuntimeError(DIED)})
    assert said(error, 2) == f"rank 1 of 2 was lost: {WITHOUT_A_WORD}"
    assert names_lost(error)
    assert not names_lost(Failed({0: peer}))
    assert not names_lost(ValueError(DIED))


def test_a_line_that_only_announces_others_is_no_reason() -> None:
    """A survivor whose call fails because another worker was killed while the group was formed."""
    failed = RuntimeError(
        "One of the worker actors failed to initialize due to error:\nTraceback …\nConnection closed by peer"
    )
    assert said(ControllerError(failed), 3) == (
        "the attempt on 3 workers ended: RuntimeError: One of the worker actors failed to initialize due to error: Connection closed by peer"
    )
    silent = RuntimeError("One of the worker actors failed to initialize due to error:")
    silent.__cause__ = TimeoutError("the workers did not answer")
    assert said(ControllerError(silent), 3).endswith("due to error: the workers did not answer")
