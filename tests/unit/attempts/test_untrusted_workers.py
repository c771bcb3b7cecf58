"""Whose fault a difference between workers is, over the attempts of a run."""

from __future__ import annotations

from dataclasses import replace

from lockstep.attempts.problems import FAULT_OF_JOB
from lockstep.attempts.untrusted_workers import UntrustedWorkers
from lockstep.record.events.union import Corrupted, Witness

NODES = {0: "a", 1: "b", 2: "c"}


def found(attempt: int, *digests: int, wrong: tuple[int, ...] = (), step: int = 7) -> Corrupted:
    workers = tuple(
        Witness(rank, f"host-{rank}", 100 * attempt + rank, "cuda:0", f"GPU-{rank}", (one,))
        for rank, one in enumerate(digests)
    )
    return Corrupted(
        step, 4, attempt, "weights", "fc.weight", workers, wrong, "majority" if wrong else "undecided"
    )


def test_the_node_of_one_that_was_outvoted_is_left_out() -> None:
    verdict = UntrustedWorkers().judge(found(1, 5, 5, 6, wrong=(2,)), NODES)
    assert verdict.nodes == {"c"}
    assert not verdict.fault_of_job


def test_two_that_differ_name_nobody_until_the_step_is_taken_again() -> None:
    untrusted_workers, doubt = UntrustedWorkers(), found(1, 5, 6)
    verdict = untrusted_workers.judge(doubt, NODES)
    assert not verdict.nodes
    assert not verdict.fault_of_job
    assert untrusted_workers.doubts == (doubt,)
    # The next attempt runs elsewhere: the nodes are those of the attempt that differed.
    settled = untrusted_workers.judge(replace(doubt, wrong=(1,), how="recomputation"), {0: "x", 1: "y"})
    assert settled.nodes == {"b"}
    assert not untrusted_workers.doubts


def test_of_two_that_differ_again_the_one_that_contradicts_itself_is_wrong() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 6), NODES)
    verdict = untrusted_workers.judge(found(2, 5, 8), NODES)
    assert verdict.nodes == {"b"}
    assert (verdict.corruption.wrong, verdict.corruption.how) == ((1,), "repetition")
    assert (
        "rank 1 (host host-1, cuda:0, GPU-1, process 201) had other weights than when it was computed again"
        in str(verdict.corruption)
    )
    assert not untrusted_workers.doubts


def test_two_that_each_say_the_same_again_are_both_named() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 6), NODES)
    verdict = untrusted_workers.judge(found(2, 5, 6), NODES)
    assert verdict.nodes == {"a", "b"}
    assert "which is wrong cannot be told from these alone: rank 0" in str(verdict.corruption)


def test_the_same_step_on_other_workers_is_the_jobs() -> None:
    """One line that names the first tensor, and both attempts."""
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 5, 6, wrong=(2,)), NODES)
    verdict = untrusted_workers.judge(found(2, 5, 9, 5, wrong=(1,)), NODES)
    assert not verdict.nodes
    assert verdict.fault_of_job is not None and verdict.fault_of_job.code == FAULT_OF_JOB.code
    assert "first in 'fc.weight'" in verdict.fault_of_job.facts["got"]
    assert verdict.fault_of_job.facts["attempt"] == "1"
    assert verdict.fault_of_job.facts["earlier"].startswith("rank 2 (host host-2")
    assert "\n" not in str(verdict.fault_of_job)


def test_the_same_worker_again_is_still_that_worker() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 5, 6, wrong=(2,)), NODES)
    assert untrusted_workers.judge(found(2, 5, 5, 7, wrong=(2,)), NODES).nodes == {"c"}


def test_another_step_on_other_workers_is_another_fault() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 5, 6, wrong=(2,)), NODES)
    assert not untrusted_workers.judge(found(2, 5, 9, 5, wrong=(1,), step=8), NODES).fault_of_job


def test_where_all_contradict_themselves_no_machine_is_wrong() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 6), NODES)
    assert untrusted_workers.judge(found(2, 7, 8), NODES).fault_of_job


def test_two_other_workers_that_differ_at_the_same_step_are_not_both_wrong() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 6), NODES)
    assert untrusted_workers.judge(found(2, 5, 6), {0: "x", 1: "y"}).fault_of_job
