"""What becomes of the verdict on wrong bits: who is told, which nodes are left out, and what ends the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.attempts.attempt_summary import AttemptSummary
from lockstep.attempts.fault_attribution import Blame
from lockstep.attempts.problems import FAULT_OF_JOB, REPEATED
from lockstep.driver.run_view import RunView
from lockstep.errors import ClusterError, FailedAt, LockstepError
from lockstep.record.events.union import Broke, Corrupted, Document, Event, Joined, Witness


class Run:
    """The attempts of a run, each of which ends with a difference between its workers."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.warned: list[str] = []
        self.summaries: list[AttemptSummary] = []
        self.blame = Blame("", self.warned.append, self.told.append)

    def ended(self, nodes: str, *digests: int) -> LockstepError | None:
        """Workers on nodes with these letters had these digests after step 7."""
        attempt = len(self.summaries) + 1
        self.summaries.append(AttemptSummary(attempt, len(nodes), 0.0))
        witnesses = (Witness(rank, "host", 1, "cpu", "", (one,)) for rank, one in enumerate(digests))
        corrupted = Corrupted(7, 4, attempt, "weights", "", tuple(witnesses), (), "undecided")
        members = {rank: Joined(rank, node, 1, Path("stacks"), "") for rank, node in enumerate(nodes)}
        view = RunView(attempt, members=members)
        view.take(corrupted)
        return self.blame.end(view, self.summaries[-1], None, lambda: 0)


def test_what_a_later_attempt_decides_of_both_is_told_and_both_nodes_are_left_out() -> None:
    run = Run()
    assert run.ended("ab", 5, 6) is None
    assert not run.told
    assert not run.blame.left_out
    assert run.ended("xy", 8, 5) is None
    decided = [event for event in run.told if isinstance(event, Corrupted)]
    assert [(event.attempt, event.wrong, event.how) for event in decided] == [
        (2, (0,), "recomputation"),
        (1, (1,), "recomputation"),
    ]
    assert run.blame.left_out == {"b", "x"}
    assert run.summaries[1].corrupted == list(map(str, decided))
    assert run.summaries[1].left_out == ["b", "x"]
    assert run.warned[1] == f"{decided[0]}; {decided[1]}; node b, node x is left out from now on"


def test_a_difference_is_judged_once() -> None:
    run = Run()
    run.ended("ab", 5, 6)
    view = RunView(1)
    view.take(replace(run.blame.doubts[0]))
    assert not run.blame.judge(view, run.summaries[0])
    assert len(run.warned) == 1


def test_all_that_an_attempt_tells_between_two_looks_is_judged() -> None:
    """It settles a doubt, differs at a later step, and goes on in memory, where ranks are other workers."""
    run = Run()
    run.ended("ab", 5, 6)
    (doubt,) = run.blame.doubts
    view = RunView(
        2, members={rank: Joined(rank, node, 1, Path("stacks"), "") for rank, node in enumerate("xyz")}
    )
    view.take(replace(doubt, wrong=(1,), how="recomputation"))
    witnesses = tuple(Witness(rank, "host", 1, "cpu", "", (one,)) for rank, one in enumerate((3, 3, 4)))
    view.take(Corrupted(9, 7, 2, "weights", "", witnesses, (2,), "majority"))
    view = view.gone_on(3, (0, 1))
    assert run.blame.judge(view, run.summaries[0]) == {"b", "z"}
    assert not run.blame.doubts
    assert not run.blame.judge(view, run.summaries[0])


def test_two_attempts_without_a_result_in_common_end_the_run() -> None:
    run = Run()
    assert run.ended("ab", 5, 6) is None
    error = run.ended("xy", 7, 8)
    assert error is not None and error.code == FAULT_OF_JOB.code
    assert not run.told


NODES = ("node-of-rank-0", "node-of-rank-1")
ECC = ClusterError("CUDA error: uncorrectable ECC error encountered")
ECC.failed_at = FailedAt("cuda", 7, 3, (4, 5))


def ended(blame: Blame, attempt: int, **seen: Any) -> tuple[LockstepError | None, AttemptSummary]:
    """An attempt on two nodes ends, of which this was seen."""
    members = {rank: Joined(rank, node, 1, Path("stacks"), "") for rank, node in enumerate(NODES)}
    summary = AttemptSummary(attempt, 2, 0.0)
    return blame.end(RunView(attempt, members=members, **seen), summary, "f00", lambda: 4), summary


def test_a_node_whose_device_fails_a_second_time_is_left_out() -> None:
    warned: list[str] = []
    blame = Blame("/runs", warned.append, lambda event: None)
    assert ended(blame, 1, device_ranks={1, 7})[1].left_out == []  # rank 7 never joined
    assert not warned
    assert ended(blame, 2, device_ranks={1})[1].left_out == ["node-of-rank-1"]
    assert warned == ["node node-of- is left out from now on: its devices have failed twice in this run"]
    assert blame.left_out == {"node-of-rank-1"}


def test_a_micro_batch_that_fails_alike_on_another_worker_ends_the_run() -> None:
    told: list[Event] = []
    blame = Blame("/runs", lambda text: None, told.append)
    assert ended(blame, 1, broken=[Broke(ECC, "", 0)])[0] is None
    assert ended(blame, 2, broken=[Broke(ECC, "", 0)])[0] is None  # the same worker
    assert not told
    error, _ = ended(blame, 3, broken=[Broke(ECC, "", 1)])
    assert error is not None and error.code == REPEATED.code
    assert "rank 0 on node node-of- in attempt 2 and rank 1 on node node-of- in attempt 3" in str(error)
    (document,) = told
    assert isinstance(document, Document) and document.name == "reproduce-step-7.py"
    assert "'/runs', 4, 7" in document.text


def test_a_failure_of_a_run_without_a_name_is_no_file_of_it() -> None:
    """Nor does one that no worker had before end it."""
    blame = Blame("/runs", lambda text: None, lambda event: None)
    for rank in range(2):
        view = RunView(rank + 1, broken=[Broke(ECC, "", rank)])
        assert blame.end(view, AttemptSummary(rank + 1, 2, 0.0), None, lambda: 4) is None
