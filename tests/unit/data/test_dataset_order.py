"""Orders that a dataset has of its own: what one may give, and one that is another when it is asked again is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lockstep.data import dataset_order
from lockstep.data import problems as data_problems
from lockstep.data.dataset import (
    checks_order,
    dataset_lengths,
    expects_epochs,
    in_memory,
    is_blocked,
    is_fingerprinted,
    reads_ahead,
    takes_arrays,
)
from lockstep.data.dataset_order import number_of_ids
from lockstep.data.fingerprint import fingerprint
from lockstep.data.mixture import Mixture
from lockstep.data.sampler import MicroBatchSampler
from lockstep.errors import JobError, Problem
from lockstep.job.interface import Job
from lockstep.plan import Plan
from lockstep.spec.loading import load_spec
from lockstep.training import problems
from lockstep.training import problems as training_problems
from lockstep.training.failure import job_at
from lockstep.training.integrity.rehearsal.child_process import in_child
from lockstep.training.job_data import dataset_size, open_data
from lockstep.training.planning import make_plan
from tests.raised import raises

SIZE = 64


class Ordered(Dataset[int]):
    """Samples that are their own ids, in the order that a function of epoch gives."""

    def __init__(self, order: Callable[[int], Any]) -> None:
        self.order = order

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index

    def epoch_order(self, seed: int, epoch: int, shuffle: str) -> Any:
        return self.order(epoch)


class Blocked(Dataset[int]):
    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return SIZE

    @property
    def block_sizes(self) -> Any:
        return self.sizes if not callable(self.sizes) else self.sizes()


def sampler(data: Any, start: int = 0, shuffle: Any = "full", epochs: int = 3) -> MicroBatchSampler:
    plan = Plan.of(SIZE, 8, 2, drop_last=True, epochs=epochs)
    return MicroBatchSampler(
        data, plan, range(plan.micro_batches), seed=3, shuffle=shuffle, start=start, guard=job_at
    )


def keyed(epoch: int) -> Any:
    return np.random.default_rng((1, epoch)).permutation(SIZE)


class Lazy:
    """An order that computes the ids of a slice."""

    def __init__(self, ids: Callable[[slice], Any]) -> None:
        self.ids = ids

    def __getitem__(self, positions: slice) -> Any:
        return self.ids(positions)


@pytest.mark.parametrize(
    "order",
    [
        keyed,
        lambda epoch: keyed(epoch).tolist(),
        lambda epoch: tuple(keyed(epoch)),
        lambda epoch: torch.from_numpy(keyed(epoch)),
        lambda epoch: keyed(epoch).astype(np.uint8),
        lambda epoch: Lazy(lambda positions: keyed(epoch)[positions]),
        lambda epoch: Lazy(lambda positions: keyed(epoch)[positions].tolist()),
    ],
)
def test_an_order_is_an_array_a_list_or_gives_slices(order: Callable[[int], Any]) -> None:
    found, wanted = sampler(Ordered(order)), sampler(Ordered(keyed))
    found.check_order()
    assert list(found) == list(wanted)
    assert all(type(i) is int for key in found for i in key.ids)


def test_samples_may_be_repeated_and_drawn_from_more_than_an_epoch_has() -> None:
    data = Ordered(lambda epoch: np.random.default_rng(epoch).integers(0, 200, SIZE))
    data.id_count = 200  # type: ignore[attr-defined]
    sampler(data).check_order()
    assert number_of_ids(data) == 200
    assert max(i for key in sampler(data) for i in key.ids) > SIZE


@pytest.mark.parametrize("draw", [np.random.permutation, lambda size: torch.randperm(size)])
def test_what_an_order_draws_from_the_default_generators_is_the_same_on_a_resume(draw: Any) -> None:
    def order(epoch: int) -> Any:
        return draw(SIZE)

    whole = list(sampler(Ordered(order)))
    np.random.seed(9)  # as another process has it
    torch.manual_seed(9)
    sampler(Ordered(order)).check_order()
    assert list(sampler(Ordered(order), start=13)) == [key for key in whole if key.step >= 13]
    assert len({tuple(i for key in whole[32 * e : 32 * e + 32] for i in key.ids) for e in range(3)}) == 3


def entropy() -> Callable[[int], Any]:
    return lambda epoch: np.random.default_rng().permutation(SIZE)


def kept() -> Callable[[int], Any]:
    generator = np.random.default_rng(7)
    return lambda epoch: generator.permutation(SIZE)


def later() -> Callable[[int], Any]:
    return lambda epoch: np.arange(SIZE) if not epoch else np.random.default_rng().permutation(SIZE)


def by_slice() -> Callable[[int], Any]:
    return lambda epoch: Lazy(lambda p: np.random.permutation(SIZE)[p])


def shuffled_on() -> Callable[[int], Any]:
    """One array, shuffled further each time: whoever is asked first of all gives other ids than a run that goes on."""
    ids = np.arange(SIZE)
    return lambda epoch: (np.random.default_rng(epoch).shuffle(ids), ids)[1]


def of_the_last_epoch() -> Callable[[int], Any]:
    """One object, which gives the ids of the epoch that it was last asked for."""
    asked = [0]
    shared = Lazy(lambda positions: keyed(asked[0])[positions])
    return lambda epoch: (asked.__setitem__(0, epoch), shared)[1]


@pytest.mark.parametrize(
    ("make", "epoch"),
    [(entropy, 0), (kept, 0), (later, 1), (by_slice, 0), (shuffled_on, 0), (of_the_last_epoch, 0)],
)
def test_an_order_that_is_another_one_when_it_is_asked_again_is_refused(make: Any, epoch: int) -> None:
    with raises(data_problems.ORDER_CHANGES, dataset="Ordered", epoch=epoch):
        sampler(Ordered(make())).check_order()


def kept_by_epoch() -> Callable[[int], Any]:
    """Drawn from a generator that goes on, and kept: equal however often it is asked for, once it was asked for in turn."""
    generator, orders = np.random.default_rng(7), dict[int, Any]()
    return lambda epoch: orders.setdefault(epoch, generator.permutation(SIZE))


@pytest.mark.parametrize("follows", [True, pytest.param(False, id="control")])
def test_an_order_that_follows_which_epochs_were_asked_for_is_refused(follows: bool) -> None:
    """A run that is resumed in epoch 1 asks for that one first."""
    data = Ordered(kept_by_epoch() if follows else keyed)

    def apart(function: Callable[[], Any]) -> Any:
        return in_child(function, Job(Job.Params()), limit_s=60)

    with raises(data_problems.ORDER_FOLLOWS_ASKING, dataset="Ordered") if follows else nullcontext():
        sampler(data).check_order(apart)
    sampler(Ordered(kept_by_epoch())).check_order(lambda _: None)  # where no process can be forked


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_an_array_that_the_dataset_fills_anew_is_an_order_of_its_own_each_time(kind: Any) -> None:
    held = np.empty(SIZE, np.int64)

    def filled(epoch: int) -> Any:
        held[:] = keyed(epoch)
        return kind(held)

    found, wanted = sampler(Ordered(filled)), sampler(Ordered(keyed))
    found.check_order()
    batches = iter(found)
    first = next(batches)
    found.at(found.plan.position(20), 0)  # of the third epoch
    assert [first, *batches] == list(wanted)


def test_an_epoch_that_the_run_does_not_reach_is_not_asked_for() -> None:
    sampler(Ordered(later()), epochs=1).check_order()


def test_an_order_that_takes_long_is_asked_for_twice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_order, "ASKED_AGAIN_WITHIN_S", 0.0)
    asked = list[int]()
    sampler(Ordered(lambda epoch: (asked.append(epoch), keyed(epoch))[1])).check_order()
    assert asked == [0, 0]
    with raises(data_problems.ORDER_CHANGES, epoch=0):
        sampler(Ordered(entropy())).check_order()


def fails(epoch: int) -> Any:
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("order", "problem", "facts"),
    [
        (lambda epoch: keyed(epoch)[:20], data_problems.ORDER_COUNT, {"got": 20, "count": 64, "of": "epoch"}),
        (lambda epoch: np.arange(80), data_problems.ORDER_COUNT, {"got": 80, "count": 64}),
        (lambda epoch: range(20), data_problems.ORDER_COUNT, {"got": 20, "count": 64}),
        (lambda epoch: np.arange(64) + 1, data_problems.ORDER_ID, {"got": 64, "last": 63}),
        (lambda epoch: np.arange(64) - 1, data_problems.ORDER_ID, {"got": -1, "last": 63}),
        (lambda epoch: [*range(63), -5], data_problems.ORDER_ID, {"got": -5, "last": 63}),
        (lambda epoch: np.arange(64.0), data_problems.ORDER_SHAPE, {"dtype": "float64", "shape": (64,), "count": 64}),
        (lambda epoch: np.zeros((64, 2), int), data_problems.ORDER_SHAPE, {"dtype": "int64", "shape": (64, 2)}),
        (lambda epoch: [[1], [2, 3]], data_problems.ORDER_NO_ARRAY, {"count": 64}),
        (lambda epoch: ["a"] * 64, data_problems.ORDER_SHAPE, {"dtype": "<U1", "shape": (64,)}),
        (lambda epoch: iter(range(64)), data_problems.ORDER_KIND, {"got": "range_iterator", "samples": 64}),
        (lambda epoch: None, data_problems.ORDER_KIND, {"got": "NoneType", "samples": 64}),
        (lambda epoch: Lazy(lambda p: np.arange(p.start, p.stop)), data_problems.ORDER_COUNT, {"got": 64, "count": 32, "of": "slice"}),
    ],
)  # fmt: skip
def test_what_is_no_order_is_told_in_one_line(
    order: Any, problem: Problem[JobError], facts: dict[str, Any]
) -> None:
    with raises(problem, what=re.compile("epoch_order of Ordered, epoch 0$"), **facts) as told:
        sampler(Ordered(order)).check_order()
    assert "\n" not in str(told.value)


def test_a_later_epoch_is_looked_at_when_its_turn_comes() -> None:
    data = Ordered(lambda epoch: keyed(epoch)[: SIZE - (epoch == 2)])
    sampler(data).check_order()
    epoch = re.compile("epoch_order of Ordered, epoch 2$")
    with raises(data_problems.ORDER_COUNT, what=epoch, got=63, count=SIZE, of="epoch"):
        list(sampler(data))


@pytest.mark.parametrize(
    ("data", "shuffle", "said"),
    [
        (Ordered(fails), "full", r"in epoch_order of Ordered, epoch 0, .* in fails\): KeyError: 'weights'"),
        (Ordered(lambda epoch: Lazy(fails)), "full", r"in epoch_order of Ordered, epoch 0, .*: KeyError"),
    ],
)
def test_what_its_own_code_raises_is_told_with_its_place(data: Any, shuffle: str, said: str) -> None:
    with pytest.raises(JobError, match=rf"^the job failed \({said}"):
        list(sampler(data, shuffle=shuffle))


def test_block_sizes_that_fail_are_told_with_their_place() -> None:
    where = {"name": "block_sizes", "location": re.compile("in fails$"), "got": "KeyError: 'weights'"}
    with raises(data_problems.ATTRIBUTE_FAILED, dataset="Blocked", **where):
        list(sampler(Blocked(lambda: fails(0)), shuffle="blocks"))


def test_any_sample_of_a_mixture_may_be_left_out() -> None:
    """Also one whose id is beyond the length of an epoch."""
    data = Mixture({"a": list(range(100)), "b": list(range(100))}, {"a": 1, "b": 1}, samples=SIZE)  # type: ignore[dict-item]

    def plan(without: str) -> Plan:
        return make_plan(load_spec({"job": {"use": "a:B"}, "data": {"without": without}}), Job(None), data)

    assert plan("150").samples == SIZE
    with raises(training_problems.NO_SUCH_SAMPLE, field="data.without", got=200, wanted=200):
        plan("150,200")
    with raises(training_problems.ALL_LEFT_OUT, got=200):
        plan("0-199")


@pytest.mark.parametrize(
    ("sizes", "problem", "facts"),
    [
        ([16, 16, 16], data_problems.BLOCK_TOTAL, {"got": 48, "wanted": 64}),
        ([16] * 5, data_problems.BLOCK_TOTAL, {"got": 80, "wanted": 64}),
        ([], data_problems.BLOCK_SIZES, {}),
        ([32.0, 32.0], data_problems.BLOCK_SIZES, {}),
        ([80, -16], data_problems.BLOCK_SIZES, {}),
    ],
)
def test_blocks_that_are_not_all_samples_are_refused(
    sizes: Any, problem: Problem[JobError], facts: dict[str, int]
) -> None:
    with raises(problem, name="Blocked", **facts):
        list(sampler(Blocked(sizes), shuffle="blocks"))
    assert len(list(sampler(Blocked(sizes), shuffle="hashed"))) == 96


def test_the_ids_of_a_mixture_are_the_samples_of_its_sources() -> None:
    sources: Any = {"a": list(range(100)), "b": list(range(100))}
    for samples in (50, 64, 300):
        mixture = Mixture(sources, {"a": 1, "b": 1}, samples=samples)
        assert number_of_ids(mixture) == 200
        order = mixture.epoch_order(0, 0, "full")
        assert order[slice(0, samples, 1)].max() < 200
    sampler(Mixture(sources, {"a": 1, "b": 1}, samples=SIZE)).check_order()


@pytest.mark.parametrize("samples", [50, 300, None])
def test_a_mixture_that_an_evaluation_would_take_a_part_of_is_refused(samples: int | None) -> None:
    """An evaluation goes by the ids, so of 50 it would take the first source's samples alone, and of 300 some of them twice (G2)."""
    sources: Any = {"a": list(range(100)), "b": list(range(100))}

    class Mixed(Job):
        def train_data(self) -> Any:
            return list(range(100))

        def eval_data(self) -> Any:
            return Mixture(sources, {"a": 1, "b": 3}, samples=samples)

    if samples is None:
        assert len(open_data(Mixed(None), 1).held_out["eval"]) == 200  # type: ignore[arg-type]
        return
    with raises(training_problems.DRAWS_EPOCHS, name="eval_data", kind="Mixture", got=samples, wanted=200):
        open_data(Mixed(None), 1)


def test_the_size_of_a_map_style_dataset_is_its_length() -> None:
    assert dataset_size(TensorDataset(torch.zeros(5, 2)), "train_data") == 5


def test_a_dataset_without_a_length_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with raises(problems.NO_LENGTH, name="train_data", got="Stream"):
        dataset_size(Stream(), "train_data")


class Columns(TensorDataset):
    """Looks names up in a mapping, and lets its KeyError out."""

    def __getattr__(self, name: str) -> Any:
        return {"lengths": [3, 4]}[name]


class Remote(TensorDataset):
    """Asks elsewhere for a name that it does not know."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(f"no answer\nfor {name}")


class Described(TensorDataset):
    """Has a fingerprint, if it can read it."""

    @property
    def fingerprint(self) -> Any:
        return {}["version"]


def test_a_name_that_a_dataset_looks_up_in_vain_is_one_that_it_does_not_have() -> None:
    data = Columns(torch.ones(2))
    assert not any(asked(data) for asked in (expects_epochs, is_blocked, is_fingerprinted, checks_order))
    assert not any(asked(data) for asked in (takes_arrays, in_memory, reads_ahead))
    assert dataset_lengths(data) == [3, 4]
    assert fingerprint(data, 2, 1) == fingerprint(TensorDataset(torch.ones(2)), 2, 1)
    assert Mixture({"a": data}, {"a": 1}).fingerprint()["a.size"] == 2


@pytest.mark.parametrize(
    ("kind", "asked", "name", "got"),
    [
        (Remote, expects_epochs, "set_epoch", "ConnectionError: no answer"),
        (Described, is_fingerprinted, "fingerprint", "KeyError: 'version'"),
    ],
)
def test_a_dataset_that_cannot_say_what_it_has_is_told_in_one_line(
    kind: Any, asked: Callable[[Any], bool], name: str, got: str
) -> None:
    with raises(data_problems.ATTRIBUTE_FAILED, dataset=kind.__name__, name=name, got=got):
        asked(kind(torch.ones(2)))
