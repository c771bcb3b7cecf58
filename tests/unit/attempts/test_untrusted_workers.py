"""Whose fault a difference between workers is, over the attempts of a run."""

from __future__ import annotations

from dataclasses import replace

from lockstep.attempts.problems import FAULT_OF_JOB
from lockstep.attempts.untrusted_workers import UntrustedWorkers
from lockstep.record.events.union import Corrupted, Witness

NODES = {0: "a", 1: "b", 2: "c"}


def found(attempt: int, *digests: int | None, wrong: tuple[int, ...] = (), step: int = 7) -> Corrupted:
    """With None of a worker only is known that it had others."""
    workers = tuple(
        Witness(
            rank, f"host-{rank}", 100 * attempt + rank, "cuda:0", f"GPU-{rank}", () if one is None else (one,)
        )
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
    assert (verdict.corruption.wrong, verdict.corruption.how) == ((1,), "recomputation")
    assert (
        "rank 1 (host host-1, cuda:0, GPU-1, process 201) had other weights than when these steps were taken again"
        in str(verdict.corruption)
    )
    assert not untrusted_workers.doubts


def test_of_attempts_on_other_workers_the_result_that_both_had_is_right() -> None:
    untrusted_workers, doubt = UntrustedWorkers(), found(1, 5, 6)
    untrusted_workers.judge(doubt, NODES)
    verdict = untrusted_workers.judge(found(2, 8, 5), {0: "x", 1: "y"})
    assert verdict.nodes == {"b", "x"}
    assert (verdict.corruption.wrong, verdict.corruption.how) == ((0,), "recomputation")
    assert verdict.settled == (replace(doubt, wrong=(1,), how="recomputation"),)
    assert not verdict.fault_of_job
    assert not untrusted_workers.doubts


def test_a_majority_decides_what_an_earlier_attempt_could_not() -> None:
    untrusted_workers, doubt = UntrustedWorkers(), found(1, 5, 6)
    untrusted_workers.judge(doubt, {0: "x", 1: "y"})
    verdict = untrusted_workers.judge(found(2, 6, 6, 9, wrong=(2,)), NODES)
    assert verdict.nodes == {"x", "c"}
    assert verdict.settled == (replace(doubt, wrong=(0,), how="recomputation"),)
    assert not untrusted_workers.doubts


def test_one_whose_result_is_not_known_is_wrong_if_no_other_is() -> None:
    """A mirror had made other weights than their owner, and has the owner's by now."""
    for repeated, wrong in ((5, (1,)), (6, (0,))):
        assert found(1, 5, None).wrong_beside((repeated,)) == wrong
    untrusted_workers, doubt = UntrustedWorkers(), found(1, 5, None)
    untrusted_workers.judge(doubt, NODES)
    verdict = untrusted_workers.judge(found(2, 8, 5), {0: "x", 1: "y"})
    assert verdict.nodes == {"b", "x"}
    assert verdict.settled == (replace(doubt, wrong=(1,), how="recomputation"),)


def test_what_is_not_known_may_be_what_another_attempt_had() -> None:
    """So no job is at fault, and without a majority nobody knows more than before."""
    for first, second in ((found(1, 5, None), found(2, 8, 9)), (found(1, 5, 6), found(2, 8, None))):
        untrusted_workers = UntrustedWorkers()
        untrusted_workers.judge(first, NODES)
        verdict = untrusted_workers.judge(second, {0: "x", 1: "y"})
        assert not verdict.fault_of_job
        assert (verdict.corruption.wrong, verdict.nodes) == ((), {"x", "y"})
    untrusted_workers, doubt = UntrustedWorkers(), found(1, 5, None)
    untrusted_workers.judge(doubt, {0: "x", 1: "y"})
    verdict = untrusted_workers.judge(found(2, 6, 6, 9, wrong=(2,)), NODES)
    assert verdict.nodes == {"x", "c"}
    assert verdict.settled == (replace(doubt, wrong=(0,), how="recomputation"),)


def test_what_the_majority_had_against_it_is_no_right_result() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 5, 6, wrong=(2,)), NODES)
    assert untrusted_workers.judge(found(2, 6, 8), {0: "x", 1: "y"}).fault_of_job


def test_of_a_micro_batch_the_newest_digest_of_each_worker_counts() -> None:
    """Two workers computed it twice in the first attempt, of the second one each computed it once."""
    untrusted_workers = UntrustedWorkers()
    first, second = found(1, 5, 6), found(2, 5, 5, 7, wrong=(2,))
    twice = [worker._replace(digests=worker.digests * 2) for worker in first.workers]
    first = replace(first, micro_batch=3, workers=tuple(twice))
    assert untrusted_workers.judge(first, {0: "x", 1: "y"}).nodes == {"x", "y"}
    verdict = untrusted_workers.judge(replace(second, micro_batch=3), NODES)
    assert verdict.nodes == {"y", "c"}
    assert not verdict.fault_of_job


def test_two_that_each_say_the_same_again_are_both_named() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 6), NODES)
    verdict = untrusted_workers.judge(found(2, 5, 6), NODES)
    assert verdict.nodes == {"a", "b"}
    assert "which is wrong cannot be told from these alone: rank 0" in str(verdict.corruption)


def test_two_bits_that_flip_before_the_same_comparison_are_chance() -> None:
    """The others of both attempts have the same weights, so the job is deterministic there."""
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 5, 6, wrong=(2,)), NODES)
    verdict = untrusted_workers.judge(found(2, 5, 9, 5, wrong=(1,)), NODES)
    assert verdict.nodes == {"b"}
    assert not verdict.settled
    assert not verdict.fault_of_job


def test_the_same_step_on_other_workers_for_a_third_time_is_the_jobs() -> None:
    """One line that names the first tensor, and two attempts."""
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 5, 6, wrong=(2,)), NODES)
    untrusted_workers.judge(found(2, 5, 9, 5, wrong=(1,)), NODES)
    verdict = untrusted_workers.judge(found(3, 8, 5, 5, wrong=(0,)), NODES)
    assert not verdict.nodes
    assert verdict.fault_of_job is not None and verdict.fault_of_job.code == FAULT_OF_JOB.code
    assert "first in 'fc.weight'" in verdict.fault_of_job.facts["got"]
    assert verdict.fault_of_job.facts["attempt"] == "2"
    assert verdict.fault_of_job.facts["earlier"].startswith("rank 1 (host host-1")
    assert "\n" not in str(verdict.fault_of_job)


def test_majorities_of_two_attempts_that_differ_are_the_jobs() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 5, 6, wrong=(2,)), NODES)
    assert untrusted_workers.judge(found(2, 7, 7, 6, wrong=(2,)), NODES).fault_of_job


def test_a_worker_alone_that_contradicts_itself_again_is_wrong() -> None:
    untrusted_workers = UntrustedWorkers()
    first, second = (
        replace(found(attempt, 5, wrong=(0,)), micro_batch=3, how="repetition") for attempt in (1, 2)
    )
    untrusted_workers.judge(first, NODES)
    assert untrusted_workers.judge(second, NODES).nodes == {"a"}
    third = replace(second, attempt=3)
    assert untrusted_workers.judge(third, {0: "x"}).fault_of_job


def test_a_gpu_is_the_same_whatever_its_rank() -> None:
    """Two that say the same again are both named; one that is outvoted for the third time is the same one."""

    def swapped(corruption: Corrupted, *ranks: int) -> Corrupted:
        return replace(
            corruption,
            workers=tuple(w._replace(rank=rank) for w, rank in zip(corruption.workers, ranks, strict=True)),
        )

    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 6), NODES)
    verdict = untrusted_workers.judge(swapped(found(2, 5, 6), 1, 0), {1: "a", 0: "b"})
    assert (verdict.nodes, verdict.fault_of_job) == ({"a", "b"}, None)
    untrusted_workers = UntrustedWorkers()
    for attempt, ranks in ((1, (0, 1, 2)), (2, (0, 2, 1)), (3, (1, 2, 0))):
        rank = ranks[2]
        corruption = swapped(found(attempt, 5, 5, 60 + attempt, wrong=(rank,)), *ranks)
        verdict = untrusted_workers.judge(corruption, dict(zip(ranks, "abc", strict=True)))
        assert (verdict.nodes, verdict.fault_of_job) == ({"c"}, None)


def test_where_nobody_had_the_result_of_the_repetition_nobody_is_named() -> None:
    """Digests that no worker had are of something else: of a state after an evaluation, or of the whole of what was sharded."""
    assert found(1, 5, 6).wrong_beside((7,)) == ()
    assert found(1, 5, 5, 6).wrong_beside((5,)) == (2,)


def test_the_same_worker_again_is_still_that_worker() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 5, 6, wrong=(2,)), NODES)
    assert untrusted_workers.judge(found(2, 5, 5, 7, wrong=(2,)), NODES).nodes == {"c"}


def test_another_step_on_other_workers_is_another_fault() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 5, 6, wrong=(2,)), NODES)
    assert untrusted_workers.judge(found(2, 15, 19, 15, wrong=(1,), step=8), NODES).nodes == {"b"}


def test_where_all_contradict_themselves_no_machine_is_wrong() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 6), NODES)
    assert untrusted_workers.judge(found(2, 7, 8), NODES).fault_of_job


def test_two_other_workers_that_differ_at_the_same_step_are_not_both_wrong() -> None:
    untrusted_workers = UntrustedWorkers()
    untrusted_workers.judge(found(1, 5, 6), NODES)
    assert untrusted_workers.judge(found(2, 5, 6), {0: "x", 1: "y"}).fault_of_job
