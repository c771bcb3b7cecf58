"""A mixture: exact proportions, every sample of a source before any again, at any position, for any worker, after any resume."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data import Mixture, Table, problems
from lockstep.data.fingerprint import fingerprint
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.mixture import apportioned
from lockstep.data.sampler import MicroBatch, MicroBatchSampler
from lockstep.errors import JobError, Problem
from lockstep.plan import Plan
from tests.raised import raises


def mixture(samples: int | None = 24, weights: Any = None, **sizes: int) -> Mixture:
    sources = {
        name: [f"{name}{i}" for i in range(size)]
        for name, size in (sizes or {"a": 10, "b": 5, "c": 2}).items()
    }
    return Mixture(sources, weights or dict.fromkeys(sources, 1.0), samples)  # type: ignore[arg-type]


def epoch(data: Mixture, number: int, seed: int = 3, shuffle: str = "full") -> list[int]:
    found: list[int] = data.epoch_order(seed, number, shuffle)[0 : len(data)].tolist()
    return found


def test_each_epoch_has_the_proportions_exactly() -> None:
    data = mixture(weights={"a": 1, "b": 2, "c": 5})
    for number in range(5):
        names = Counter(data.source_of(i)[0] for i in epoch(data, number))
        assert names == {"a": 3, "b": 6, "c": 15} == data.counts(number)


def test_every_sample_of_a_source_is_drawn_before_any_again() -> None:
    """Through the epochs: draws of a small share go on where the epoch before ended."""
    data = mixture(weights={"a": 1, "b": 2, "c": 5})
    drawn: Counter[tuple[str, int]] = Counter()
    for number in range(10):  # 30 draws of a, 60 of b, 150 of c
        drawn.update(data.source_of(i) for i in epoch(data, number))
        for name, size in (("a", 10), ("b", 5), ("c", 2)):
            times = [drawn[name, i] for i in range(size)]
            assert max(times) - min(times) <= 1
    assert [drawn["a", i] for i in range(10)] == [3] * 10


@given(
    weights=st.lists(st.integers(0, 50), min_size=2, max_size=5).filter(any),
    samples=st.integers(1, 60),
    number=st.integers(0, 4),
    start=st.integers(0, 59),
    step=st.integers(1, 7),
)
def test_an_order_can_be_read_at_any_position(
    weights: list[int], samples: int, number: int, start: int, step: int
) -> None:
    names = "abcde"[: len(weights)]
    data = mixture(
        samples, dict(zip(names, weights, strict=True)), **{name: 3 + i for i, name in enumerate(names)}
    )
    whole = epoch(data, number)
    assert len(whole) == samples
    start = min(start, samples)
    assert data.epoch_order(3, number, "full")[start:samples:step].tolist() == whole[start:samples:step]


def test_the_order_is_another_one_in_each_epoch_and_for_each_seed() -> None:
    data = mixture()
    orders = [epoch(data, number, seed) for number in range(3) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert epoch(data, 0) == epoch(mixture(), 0)


def test_unshuffled_it_is_source_after_source() -> None:
    data = mixture(8, {"a": 2, "b": 1, "c": 1})
    names = [data[i] for i in epoch(data, 0, shuffle="none")]
    assert names == ["a0", "a1", "a2", "a3", "b0", "b1", "c0", "c1"]
    assert [data[i] for i in epoch(data, 1, shuffle="none")] == [
        "a4",
        "a5",
        "a6",
        "a7",
        "b2",
        "b3",
        "c0",
        "c1",
    ]


def test_weights_by_epoch() -> None:
    data = mixture(10, {0: {"a": 1, "b": 0, "c": 0}, 2: {"a": 1, "b": 4, "c": 0}})
    assert [data.counts(number) for number in range(4)] == [
        *[{"a": 10, "b": 0, "c": 0}] * 2,
        *[{"a": 2, "b": 8, "c": 0}] * 2,
    ]
    drawn = Counter(data.source_of(i) for number in range(7) for i in epoch(data, number))
    assert [drawn["a", i] for i in range(10)] == [3] * 10  # 10 + 10 + 5 × 2 draws
    assert sum(drawn["b", i] for i in range(5)) == 40


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_number_of_workers_fetches_the_same_from_any_step(workers: int) -> None:
    data = mixture(26, {"a": 3, "b": 1, "c": 1})
    plan = Plan.of(26, 8, 2, drop_last=False, epochs=3)

    def fetched(own: range, start: int) -> dict[tuple[int, int], list[int]]:
        batches = MicroBatchSampler(data, plan, own, seed=5, shuffle="full", start=start)
        return {(batch.step, batch.micro_batch): list(batch.ids) for batch in batches}

    alone = fetched(range(4), 0)
    for start in (0, 1, 5, 9):
        found = [fetched(own, start) for own in plan.ranges(workers)]
        together = {key: ids for one in found for key, ids in one.items()}
        assert together == {key: ids for key, ids in alone.items() if key[0] >= start}
    ids = [i for key in sorted(alone) for i in alone[key]]
    assert len(ids) == 78
    first = Counter(data.source_of(i)[0] for key in alone if key[0] < 4 for i in alone[key])
    assert first == data.counts(0)


@given(samples=st.integers(1, 500), weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any))
def test_apportioning_is_whole_and_near(samples: int, weights: list[float]) -> None:
    counts = apportioned(samples, {str(i): weight for i, weight in enumerate(weights)})
    assert sum(counts) == samples
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - samples * weight / sum(weights)) < 1 + 1e-6
        assert count == 0 or weight > 0


def test_ids_beyond_the_last_go_round() -> None:
    """An epoch may be longer than all sources together, and whoever looks at its samples counts to its length."""
    data = mixture(40)
    assert [data[i] for i in range(17, 20)] == [data[i] for i in range(3)] == ["a0", "a1", "a2"]
    assert mixture(None).samples == 17


def test_what_is_mixed_and_how_is_in_the_fingerprint() -> None:
    fields = [
        fingerprint(data, len(data), 0)
        for data in (
            mixture(),
            mixture(25),
            mixture(weights={"a": 1, "b": 2, "c": 5}),
            mixture(a=10, b=5, c=3),
        )
    ]
    assert len({str(one) for one in fields}) == 4
    assert fields[0] == fingerprint(mixture(), 24, 9)


@pytest.mark.parametrize(
    ("make", "problem", "facts"),
    [
        (
            lambda: mixture(weights={"a": 1}),
            problems.MIXTURE_OTHER_SOURCES,
            {"got": ["a"], "wanted": ["a", "b", "c"]},
        ),
        (
            lambda: mixture(weights={"a": 0, "b": 0, "c": 0}),
            problems.MIXTURE_WEIGHTS,
            {"got": {"a": 0, "b": 0, "c": 0}},
        ),
        (
            lambda: mixture(weights={"a": -1, "b": 1, "c": 1}),
            problems.MIXTURE_WEIGHTS,
            {"got": {"a": -1, "b": 1, "c": 1}},
        ),
        (lambda: mixture(weights={2: {"a": 1, "b": 1, "c": 1}}), problems.MIXTURE_FIRST_EPOCH, {}),
        (
            lambda: mixture(weights={0: 3}),
            problems.MIXTURE_OTHER_SOURCES,
            {"got": "int", "wanted": ["a", "b", "c"]},
        ),
        (lambda: mixture(0), problems.MIXTURE_SAMPLES, {"got": 0}),
        (lambda: mixture(4, {"a": 1, "b": 1}, a=3, b=0), problems.MIXTURE_EMPTY_SOURCE, {"name": "b"}),
        (
            lambda: Mixture({"a": iter([1])}, {"a": 1}),
            problems.MIXTURE_SOURCE,
            {"name": "a", "got": "list_iterator"},
        ),  # type: ignore[dict-item]
    ],
)
def test_what_cannot_be_mixed_is_refused(
    make: Any, problem: Problem[JobError], facts: dict[str, Any]
) -> None:
    with raises(problem, **facts):
        make()


def test_blocks_are_refused() -> None:
    with raises(problems.MIXTURE_BLOCKS):
        mixture().check_order("blocks", 8)


def test_a_table_is_refused(tmp_path: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "part.parquet")
    with raises(problems.MIXTURE_TABLE, name="a"):
        Mixture({"a": Table(str(tmp_path))}, {"a": 1})


def test_sources_may_fetch_many_at_once() -> None:
    """A Subset has `__getitems__`, which would give a list."""
    subset = torch.utils.data.Subset([10, 20, 30], [2, 0])  # type: ignore[arg-type]
    data = Mixture({"a": subset}, {"a": 1})
    assert [data[i] for i in range(2)] == [30, 10]


def test_a_sample_that_is_left_out_is_not_read_for_the_fingerprint() -> None:
    """Nor in a mixture whose subclass fingerprints itself as a user's dataset does, without a word about samples."""

    class Damaged(list[int]):
        def __getitem__(self, index: Any) -> Any:
            assert index != 2
            return super().__getitem__(index)

    class Named(Mixture):
        def fingerprint(self) -> dict[str, Any]:  # type: ignore[override]
            return {"name": "mixed"}

    sources: Any = {"a": [1, 2], "b": Damaged([3, 4, 5])}
    assert "b.samples" in fingerprint(Mixture(sources, {"a": 1, "b": 1}), 5, 0, (4).__eq__)
    assert fingerprint(Named(sources, {"a": 1, "b": 1}), 5, 0, (4).__eq__) == {"name": "mixed"}


class Torn(list[int]):
    def __getitem__(self, index: Any) -> Any:
        if index == 2:
            raise ValueError("torn file")
        return super().__getitem__(index)


def test_a_sample_that_fails_is_named_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the index there, and by the id that `data.without` takes."""
    data = Mixture({"a": [1, 2], "b": Torn([3, 4, 5])}, {"a": 1, "b": 1})  # type: ignore[dict-item]
    batches = MicroBatches(data, list, seed=3, purpose="data")
    with raises(problems.FETCH_FAILED, what="sample 4 (sample 2 of source 'b')", got="torn file"):
        batches.fetched(MicroBatch(0, 0, [1, 4]))
    monkeypatch.setattr("lockstep.data.fingerprint.PAUSES_S", (0.0, 0.0, 0.0))
    advice = "leave it out of train_data by data.without=4, "
    with raises(problems.FINGERPRINT_SAMPLE, what="sample 2 of source 'b'", leave_out=advice) as raised:
        fingerprint(data, 5, 0)
    assert isinstance(raised.value.__cause__, ValueError)
    unreadable: Any = {"a": [1, 2], "b": [3, lambda: 4]}
    with raises(problems.SAMPLE_CONTENT, what="sample 1 of source 'b'"):
        fingerprint(Mixture(unreadable, {"a": 1, "b": 1}), 4, 0)


def test_a_mixture_is_no_source_of_another() -> None:
    """Its weights would be lost: the outer one takes its samples by their positions."""
    inner = Mixture({"a": [0] * 100, "b": [1] * 100}, {"a": 0.9, "b": 0.1}, samples=100)
    for source in (inner, torch.utils.data.Subset(inner, range(50))):
        with raises(problems.MIXTURE_OF_MIXTURE, name="ab"):
            Mixture({"ab": source, "c": [2] * 100}, {"ab": 0.5, "c": 0.5})


def test_a_subset_of_a_mixture_is_no_training_data() -> None:
    """A run would go through it without the weights."""
    data, plan = mixture(), Plan.of(8, 4, 2, drop_last=True, epochs=1)
    with raises(problems.MIXTURE_SUBSET):
        MicroBatchSampler(torch.utils.data.Subset(data, range(8)), plan, range(2), seed=3, shuffle="full")
