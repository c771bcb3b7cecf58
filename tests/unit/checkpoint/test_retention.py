"""What to keep and what to clear, tried over every small store there is."""

from __future__ import annotations

import math
from itertools import chain, combinations, product

import pytest

from lockstep.checkpoint.layout import MANIFEST
from lockstep.checkpoint.retention import Keep, Known, StepFolder, leftovers, surplus

STEPS = (10, 20, 30, 40)
METRICS = (None, 1.0, 2.0, math.nan)
KEEPS = [
    Keep(last=last, metric=metric, mode=mode, every=every, pinned=frozenset(pinned))
    for last, (metric, mode), every, pinned in product(
        (1, 2, 9), ((None, "min"), ("m", "min"), ("m", "max")), (None, 20), ((), (10, 30))
    )
]


def subsets(items: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(items, size) for size in range(len(items) + 1)))


def stores() -> list[list[Known]]:
    """Every store of some of the steps, each good or damaged; metrics vary over the good ones."""
    made = []
    for steps in subsets(STEPS):
        for good in product((True, False), repeat=len(steps)):
            for metrics in product(METRICS, repeat=min(sum(good), 3)):
                values = iter((*metrics, 1.5))
                made.append(
                    [
                        Known(
                            step,
                            whole,
                            {"m": value} if whole and (value := next(values)) is not None else None,
                        )
                        for step, whole in zip(steps, good, strict=True)
                    ]
                )
    return made


STORES = stores()


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_every_store_keeps_what_it_must(keep: Keep) -> None:
    for known in STORES:
        deleted = surplus(reversed(known), keep)
        assert deleted == sorted(set(deleted)) and set(deleted) <= {checkpoint.step for checkpoint in known}
        good = [checkpoint.step for checkpoint in known if checkpoint.good]
        stay = [step for step in good if step not in deleted]
        if not good:
            assert deleted == [], "nothing is good: nothing is deleted"
            continue
        assert max(good) in stay, "the last good one is never deleted"
        assert not set(deleted) & keep.pinned
        assert set(good[-keep.last :]) <= set(stay)
        assert all(step in stay for step in good if keep.every and step % keep.every == 0)
        damaged = [checkpoint.step for checkpoint in known if not checkpoint.good]
        assert all((step in deleted) == (step < max(good)) for step in damaged if step not in keep.pinned)
        best = best_of(known, keep)
        assert best is None or best in stay
        kept_for_a_reason = set(good[-keep.last :]) | keep.pinned | {best}
        kept_for_a_reason |= {step for step in good if keep.every and step % keep.every == 0}
        assert set(stay) <= kept_for_a_reason, "nothing stays without a reason"


def best_of(known: list[Known], keep: Keep) -> int | None:
    """The plain way: look at each in the order of steps."""
    best: tuple[float, int] | None = None
    for checkpoint in known:
        value = (checkpoint.metrics or {}).get(keep.metric or "", math.nan)
        if not checkpoint.good or keep.metric is None or math.isnan(value):
            continue
        if best is None or (value < best[0] if keep.mode == "min" else value > best[0]):
            best = (value, checkpoint.step)
    return best[1] if best else None


def test_applying_it_again_changes_nothing() -> None:
    for known in STORES[::7]:
        for keep in KEEPS:
            deleted = surplus(known, keep)
            assert surplus([checkpoint for checkpoint in known if checkpoint.step not in deleted], keep) == []


def test_keeping_none_at_all_is_refused() -> None:
    for wrong in ({"last": 0}, {"last": -1}, {"every": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            Keep(**wrong)


def files(attempt: int, *ranks: int) -> set[str]:
    return {f"model.a{attempt:04d}.r{rank:04d}.safetensors" for rank in ranks or (0,)}


def test_what_a_crash_left_is_cleared_and_nothing_else() -> None:
    whole = StepFolder(100, frozenset({MANIFEST, *files(1)}), frozenset({MANIFEST, *files(1)}), 1)
    replaced = StepFolder(
        200, frozenset({MANIFEST, *files(1), *files(2)}), frozenset({MANIFEST, *files(2)}), 2
    )
    unfinished = StepFolder(300, frozenset({*files(1, 0, 1), "receipt.a0001.r0001.part", "notes.txt"}))
    unreadable = StepFolder(400, frozenset({MANIFEST, *files(1)}))
    folders = [whole, replaced, unfinished, unreadable]
    assert leftovers(folders, 3) == {
        200: sorted(files(1)),
        300: sorted([*files(1, 0, 1), "receipt.a0001.r0001.part"]),
    }
    assert leftovers(folders, 1) == {}, "the current attempt may be about to publish it"


def test_the_current_attempts_failed_save_is_cleared_once_a_later_one_is_published() -> None:
    failed = StepFolder(300, frozenset(files(2)))
    being_written = StepFolder(500, frozenset(files(2)))
    published = StepFolder(400, frozenset({MANIFEST, *files(2)}), frozenset({MANIFEST, *files(2)}), 2)
    assert leftovers([failed, being_written], 2) == {}
    assert leftovers([failed, published, being_written], 2) == {300: sorted(files(2))}


def test_files_of_an_attempt_that_is_newer_than_this_one_are_left_alone() -> None:
    assert leftovers([StepFolder(300, frozenset(files(9)))], 2) == {}
