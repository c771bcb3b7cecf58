"""The way from the dataset to the device: the same bits from any process, errors that name their samples."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, default_collate, default_convert
from torch.utils.data import _utils as torch_loader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import lockstep
from lockstep.data import loader as loader_module
from lockstep.data import problems
from lockstep.data.conversion import converted
from lockstep.data.dataset import draws_nothing
from lockstep.data.loader import ALIGNMENT, Loader, map_tensors, moved, own_elements
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import MicroBatch
from lockstep.errors import ClusterError, JobError, LockstepError
from lockstep.job.interface import Job
from lockstep.threads import library_threads
from lockstep.training.determinism import determinism
from tests.raised import raises

CPU = torch.device("cpu")
KEYS = [MicroBatch(step, m, [4 * step + 2 * m, 4 * step + 2 * m + 1]) for step in range(3) for m in range(2)]


class Samples(Dataset[Any]):
    """Twelve samples, each what a function gives for its id."""

    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class Whole(Samples):
    """The same, fetched a micro-batch at a time."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one at a time")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.sample(index) for index in indices]


class Short(Whole):
    """One that passes over samples that cannot be read."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return super().__getitems__([index for index in indices if index != 5])


class Ahead(Samples):
    """The same, which a thread may fetch."""

    draws_nothing = True


@pytest.fixture(autouse=True)
def connections_of_others() -> Iterator[None]:
    """A worker has more of them before its data are opened than a message names: Ray's, and those to the other workers."""
    others = [end for _ in range(4) for end in socket.socketpair()]
    loader_module.fork_isolation.set_apart()
    yield
    for end in others:
        end.close()


def fetched(
    samples: Dataset[Any],
    *,
    collate: Callable[[Sequence[Any]], Any] = default_collate,
    processes: int = 0,
    keys: Sequence[MicroBatch] = KEYS,
) -> list[Any]:
    loader = Loader(MicroBatches(samples, collate, seed=3, purpose="data"), keys, CPU, processes)
    try:
        return list(loader)
    finally:
        loader.close()


def drawn(index: int) -> Tensor:
    """A draw from each default generator, and from the job's own."""
    draws = [random.random(), np.random.rand(), float(torch.rand(())), float(lockstep.rng("noise").random())]
    return torch.tensor([index, *draws], dtype=torch.float64)


@pytest.mark.parametrize("kind", [Samples, Whole])
def test_draws_do_not_depend_on_the_processes(kind: type[Samples]) -> None:
    alone = fetched(kind(drawn))
    for processes in (1, 2, 3):
        assert all(map(torch.equal, fetched(kind(drawn), processes=processes), alone))


def test_draws_do_not_depend_on_what_was_fetched_before() -> None:
    """A run that starts later, or another worker's range: the same draws for the same micro-batch."""
    every = fetched(Samples(drawn))
    for start in range(len(KEYS)):
        assert all(map(torch.equal, fetched(Samples(drawn), keys=KEYS[start::2]), every[start::2]))


def test_draws_differ_between_micro_batches_and_between_samples() -> None:
    draws = torch.cat(fetched(Samples(drawn)))
    for generator in (1, 2, 3):
        assert len(set(draws[:, generator].tolist())) == 12
    assert len(set(draws[:, 4].tolist())) == 6, "rng() is keyed by the micro-batch"


class Augmenting(Ahead):
    """What it inherits promised to draw nothing; what it fetches promises nothing."""

    def __getitem__(self, index: int) -> Any:
        return torch.cat([super().__getitem__(index)[:1], drawn(index)[1:]])


class Delegating(Dataset[Any]):
    """A wrapper that looks like what it wraps, and draws."""

    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.cat([self.inner[index][:1], drawn(index)[1:]])


class Filed(Ahead):
    def __len__(self) -> int:
        return 10


class Again(Augmenting):
    draws_nothing = True


class Perhaps(Augmenting):
    @property
    def draws_nothing(self) -> bool:  # type: ignore[override]
        return self.sample is torn


@pytest.mark.parametrize("changed", [Augmenting, lambda sample: Delegating(Ahead(sample))])
@pytest.mark.parametrize("processes", [0, 2])
def test_what_fetches_anew_does_not_inherit_that_it_draws_nothing(changed: Any, processes: int) -> None:
    """It draws under its micro-batch's seed: in a thread ahead of time it would draw what nobody seeded, and have no `lockstep.rng()`."""
    found = fetched(changed(drawn), processes=processes)
    draws = torch.cat(found)[:, 1:]
    assert len(set(draws[:, 0].tolist())) == 12
    assert all(map(torch.equal, found, fetched(changed(drawn))))


def test_a_promise_to_draw_nothing_is_that_of_the_class_that_fetches() -> None:
    for held in (Ahead(torn), Filed(torn), Again(torn), Perhaps(torn)):
        assert draws_nothing(held), held
    for empty in (Samples(torn), Augmenting(torn), Delegating(Ahead(torn)), Perhaps(drawn)):
        assert not draws_nothing(empty), empty


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.rand, lambda: torch.rand(()), lambda: lockstep.rng("noise").random()],
    ids=["python", "numpy", "torch", "lockstep"],
)
def test_a_dataset_that_draws_though_it_promises_not_to_is_refused(draw: Callable[[], Any]) -> None:
    def checked(kind: type[Samples], sample: Callable[[int], Any]) -> None:
        MicroBatches(kind(sample), default_collate, seed=3, purpose="data").check_draws_nothing(KEYS[0])

    with raises(problems.DRAWS, dataset="Ahead", samples="samples 0, 1"):
        checked(Ahead, lambda _index: draw())
    checked(Samples, lambda _index: draw())
    checked(Ahead, lambda index: np.random.default_rng(index).random())


def test_sums_in_a_dataset_do_not_depend_on_the_processes() -> None:
    """A forked process has one intra-op thread, so fetching has one everywhere; a sum's bits depend on that."""

    def total(index: int) -> Tensor:
        return torch.randn(300_001, generator=torch.Generator().manual_seed(index)).sum()

    def threads(index: int) -> int:
        return torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone, apart = fetched(Samples(total)), fetched(Samples(total), processes=2)
        assert all(map(torch.equal, alone, apart))
        assert torch.cat(fetched(Samples(threads))).tolist() == [1] * 12
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_sums_ahead_of_time_have_one_thread_as_well() -> None:
    """A thread that fetches ahead, and one more library than torch: the number of loader processes decides about neither."""

    def threads(index: int) -> list[int]:
        return [torch.get_num_threads(), library_threads()]

    before = torch.get_num_threads()
    with determinism("strict", threads=2):
        for kind, processes in ((Samples, 0), (Ahead, 0), (Ahead, 2)):
            every = fetched(kind(threads), collate=list, processes=processes)
            assert every == [[[1, 1], [1, 1]]] * 6
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


# --- errors -----------------------------------------------------------------------------------------------


def torn(index: int) -> Any:
    if index == 7:
        raise ValueError("torn\n file")
    return index


TORN_AT = f"tests/unit/data/test_loader.py:{torn.__code__.co_firstlineno + 2} in torn"
"""Where the job's own code fails, as an error names it."""

TORN = {
    "where": "step 2, micro-batch 1",
    "location": f", {TORN_AT}",
    "kind": "ValueError",
    "got": "torn file",
    "forked": "",
}


def one_line(error: LockstepError) -> str:
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_sample_that_fails_is_named(processes: int) -> None:
    with raises(problems.FETCH_FAILED, what="sample 7", **TORN):
        fetched(Samples(torn), processes=processes)


@pytest.mark.parametrize("kind", [Samples, Ahead])
@pytest.mark.parametrize("processes", [0, 2])
def test_a_collation_that_returns_none_does_not_pass_for_a_micro_batch_without_samples(
    kind: type[Samples], processes: int
) -> None:
    def collate(samples: Sequence[Any]) -> Any:
        return None if 6 in samples else list(samples)

    with raises(problems.NO_BATCH, samples="samples 6, 7", where="step 2, micro-batch 1"):
        fetched(kind(int), collate=collate, processes=processes)
    empty = [MicroBatch(0, 0, [0, 1]), MicroBatch(0, 1, [])]
    assert fetched(kind(int), collate=collate, processes=processes, keys=empty) == [[0, 1], None]


@pytest.mark.parametrize("processes", [0, 2])
def test_samples_that_fail_together_are_named(processes: int) -> None:
    with raises(problems.FETCH_FAILED, what="samples 6, 7", **TORN):
        fetched(Whole(torn), processes=processes)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_collation_that_fails_names_its_samples(processes: int) -> None:
    facts = {"what": "the collation of samples 0, 1", "where": "step 1, micro-batch 0", "location": ""}
    with raises(problems.FETCH_FAILED, **facts, kind="RuntimeError", got=re.compile("equal size")):
        fetched(Samples(lambda index: torch.zeros(index + 1)), processes=processes)


def test_many_samples_are_named_by_the_first_eight() -> None:
    with raises(problems.FETCH_FAILED, what="samples 0, 1, 2, 3, 4, 5, 6, 7, …"):
        fetched(Whole(torn), keys=[MicroBatch(0, 0, list(range(10)))])


@pytest.mark.parametrize("processes", [0, 2])
def test_an_error_of_the_jobs_own_words_passes_as_it_is(processes: int) -> None:
    def refused(index: int) -> Any:
        raise JobError("train_data: the index is older than the files; build it anew")

    with pytest.raises(JobError, match=r"^train_data: the index is older"):
        fetched(Samples(refused), processes=processes)


def test_micro_batches_before_the_one_that_fails_are_given() -> None:
    loader = Loader(MicroBatches(Samples(torn), list, seed=3, purpose="data"), KEYS, CPU)
    assert [next(loader) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(JobError):
        next(loader)


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks every 0.1 s whether its loader processes live, instead of every 5."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("sample", [int, torch.tensor], ids=["by value", "in shared memory"])
def test_a_killed_loader_process_is_told(sample: Callable[[int], Any]) -> None:
    """As the kernel does when memory runs out."""

    def killed(index: int) -> Any:
        if index == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample(index)

    with raises(problems.PROCESS_LOST):
        fetched(Samples(killed), processes=1)


def killed_inside_close(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kill each loader process when `close` waits for it, and let Python handle the SIGCHLD right there."""
    whole_join, own, dead = BaseProcess.join, set(multiprocessing.active_children()), []

    def join(self: BaseProcess, timeout: float | None = None) -> None:
        if self in own and self.pid not in dead:
            dead.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
            time.sleep(0.1)  # which a handler that has not run yet interrupts
        whole_join(self, timeout)

    monkeypatch.setattr(BaseProcess, "join", join)
    return dead


@pytest.mark.parametrize("watched", [False, True])
def test_a_loader_process_that_is_killed_while_it_is_ended_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    """Nothing that it owed is wanted any more. With torch's own watch, the watch's error takes the other's place."""
    if watched:
        monkeypatch.setattr(loader_module, "_unwatched", lambda iterator: None)
    loader = Loader(MicroBatches(Samples(int), list, seed=3, purpose="data"), KEYS, CPU, 1)
    dead = killed_inside_close(monkeypatch)
    with pytest.raises(RuntimeError if watched else ClusterError, match="killed" if watched else "under way"):
        try:
            next(loader)
            raise ClusterError("under way")
        finally:
            loader.close()
    assert len(dead) == 1


class Stuck:
    """Lets the next `left` processes that are forked here never begin: they do nothing and hear no SIGTERM.

    That is how Python before 3.11.8 leaves one that was forked at a bad moment.
    """

    left = 0
    doomed = False

    @classmethod
    def before_fork(cls) -> None:
        cls.doomed, cls.left = cls.left > 0, max(0, cls.left - 1)

    @classmethod
    def in_child(cls) -> None:
        if cls.doomed:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()


os.register_at_fork(before=Stuck.before_fork, after_in_child=Stuck.in_child)


def assert_ended(before: set[Any]) -> None:
    """No process is left but those of `before`, once torch's have ended: with the interval of these tests it hardly waits for them."""
    for process in set(multiprocessing.active_children()) - before:
        process.join(30)
    assert set(multiprocessing.active_children()) <= before


def test_loader_processes_that_never_begin_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits, and none of them is left behind."""
    alone, before = fetched(Samples(drawn)), set(multiprocessing.active_children())
    monkeypatch.setattr(loader_module, "START_S", 1.0)
    monkeypatch.setattr(torch_loader, "MP_STATUS_CHECK_INTERVAL", 0.1)
    Stuck.left = 1
    assert all(map(torch.equal, fetched(Samples(drawn), processes=2), alone))
    assert Stuck.left == 0
    assert_ended(before)


def test_loader_processes_that_never_begin_at_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(multiprocessing.active_children())
    monkeypatch.setattr(loader_module, "START_S", 0.1)
    monkeypatch.setattr(torch_loader, "MP_STATUS_CHECK_INTERVAL", 0.1)
    Stuck.left = loader_module.STARTS
    with raises(problems.PROCESSES_SLOW, limit_s=0.1, tries=loader_module.STARTS):
        fetched(Samples(drawn), processes=1)
    assert_ended(before)


def test_close_leaves_no_process_behind() -> None:
    before = set(multiprocessing.active_children())
    loader = Loader(MicroBatches(Samples(drawn), default_collate, seed=3, purpose="data"), KEYS, CPU, 2)
    next(loader)
    assert len(set(multiprocessing.active_children()) - before) == 2
    loader.close()
    assert_ended(before)


# --- what is handed over ----------------------------------------------------------------------------------


def at(offset: int, value: float = 1.0) -> Tensor:
    """Sixteen floats that begin `offset` bytes after an aligned address."""
    memory = np.full(ALIGNMENT + 256, value, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT + offset
    return torch.from_numpy(memory[start : start + 64]).view(torch.float32)


@pytest.mark.parametrize("processes", [0, 1])
def test_tensors_are_handed_over_aligned(processes: int) -> None:
    """From a loader process as well, where a tensor's place in memory is not the one that it had there."""
    assert [at(offset).data_ptr() % ALIGNMENT for offset in (0, 4, 16, 48)] == [0, 4, 16, 48]

    def collate(samples: Sequence[int]) -> dict[str, Any]:
        return {"tensors": [at(offset) for offset in (0, 4, 16, 48)], "pair": (at(8), at(0)[1:])}

    for batch in fetched(Samples(int), collate=collate, processes=processes):
        every = [*batch["tensors"], *batch["pair"]]
        assert [tensor.data_ptr() % ALIGNMENT for tensor in every] == [0] * 6
        assert all(torch.equal(tensor, at(0)[: len(tensor)]) for tensor in every)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_slice_keeps_its_strides_wherever_it_lies(processes: int) -> None:
    """Else its address would decide in which order a loss adds it up. The control: `clone` alone closes the gaps, and gives another sum."""
    values = torch.randn(8, 70, generator=torch.Generator().manual_seed(1))

    def columns(offset: int) -> Tensor:
        memory = np.empty(values.nbytes + 2 * ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT + offset
        rows = torch.from_numpy(memory[start : start + values.nbytes]).view(torch.float32).view(8, 70)
        return rows.copy_(values)[:, :60]

    def collate(samples: Sequence[int]) -> list[Tensor]:
        return [*map(columns, (0, 16, 32, 48)), columns(16).t(), columns(16)[:1].expand(3, 60)]

    with determinism("strict", threads=1):
        for *slices, turned, expanded in fetched(Samples(int), collate=collate, processes=processes):
            assert {(each.stride(), float(each.norm())) for each in slices} == {
                ((70, 1), float(columns(0).norm()))
            }
            assert (turned.stride(), expanded.stride()) == ((1, 70), (0, 1))
        assert columns(0).clone().norm() != columns(0).norm()


class Pair(NamedTuple):
    x: Tensor
    y: Any


def test_a_tensor_that_was_expanded_has_memory_of_its_own_before_it_is_pinned() -> None:
    """torch copies into pinned memory of the same strides, and refuses where elements share a place."""
    expanded, plain, sparse = torch.ones(1, 4).expand(3, 4), torch.ones(3, 4).t(), torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.ones(1, 4).expand(3, 4).copy_(expanded)
    found = own_elements(expanded)
    assert found.stride() == (4, 1)
    assert torch.equal(found, expanded)
    assert own_elements(plain) is plain
    assert own_elements(sparse) is sparse


def test_map_tensors_keeps_every_container() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    lists = defaultdict(list, {"a": one})
    for value, wanted in (
        (one, two),
        ([one, 1], [two, 1]),
        ((one, "a"), (two, "a")),
        (Pair(one, [one]), Pair(two, [two])),
        ({"a": one}, {"a": two}),
        (OrderedDict(a=one), OrderedDict(a=two)),
        (UserDict(a=one), UserDict(a=two)),
        (lists, defaultdict(list, {"a": two})),
        (None, None),
    ):
        changed = map_tensors(value, lambda tensor: tensor + 1)
        assert type(changed) is type(value)
        assert repr(changed) == repr(wanted)
    assert lists == {"a": one}, "what is given is left as it is"


def counted() -> dict[str, Any]:
    """Counts in a batch, alone and within, beside arrays that torch has tensors of or not."""
    return {
        "words": Counter(a=3, b=1),
        "each": [Counter(a=2), {"inner": Counter(b=np.int64(5))}],
        "day": np.array(["2024-02-29"], "datetime64[D]"),
        "took": np.array([3], "timedelta64[s]"),
        "moment": np.datetime64("2024-02-29"),
        "record": np.array([(1, 2.5)], [("id", "i4"), ("x", "f8")]),
        "object": np.array([None, "a"], object),
        "text": np.array(["a", "b"]),
        "long": np.array([1, 2], np.longdouble),
        "bytes": np.bytes_(b"ab"),
        "x": np.arange(3, dtype=np.float32),
    }


@pytest.mark.parametrize("kind", [Samples, Ahead])
@pytest.mark.parametrize("processes", [0, 1])
def test_a_batch_keeps_counts_and_arrays_that_torch_has_no_tensors_of(
    kind: type[Samples], processes: int
) -> None:
    """`update` of a Counter adds: a count that torch converts is twice what it was."""
    for batch in fetched(kind(int), collate=lambda samples: counted(), processes=processes):
        x, inner = batch.pop("x"), batch["each"][1]["inner"].pop("b")
        assert torch.equal(x, torch.arange(3.0))
        assert torch.equal(inner, torch.tensor(5))
        wanted = counted()
        del wanted["x"], wanted["each"][1]["inner"]["b"]
        assert repr(batch) == repr(wanted)


@pytest.mark.parametrize("array", [np.arange(6.0)[::-2], np.arange(3, dtype=">i4"), np.array(3, ">f8")])
def test_an_array_in_another_order_becomes_a_tensor_of_its_numbers(array: Any) -> None:
    tensor = converted(array)
    assert tensor.shape == array.shape
    assert tensor.tolist() == array.tolist()


def test_counts_are_pinned_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    pinned = torch_loader.pin_memory.pin_memory(loader_module._Pinnable([Counter(a=3), np.ones(2), Itself]))
    assert pinned[0] == Counter(a=3)
    assert (len(streams.pinned), pinned[2]) == (1, Itself)


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "a",
        b"a",
        torch.ones(2),
        np.float16(2),
        np.True_,
        (1, (np.ones(2), "a")),
        range(2),
        deque([np.ones(1)]),
        {"a": np.ones(2), 1: [np.int64(3)]},
        OrderedDict(b=np.ones(1), a=2),
        UserDict(a=np.ones(1)),
        defaultdict(list, a=np.ones(1)),
        MappingProxyType({"a": np.ones(1)}),
    ],
    ids=repr,
)
def test_ordinary_values_are_converted_as_torch_converts_them(value: Any) -> None:
    found, wanted = converted(value), default_convert(value)  # type: ignore[no-untyped-call]
    assert type(found) is type(wanted)
    assert repr(found) == repr(wanted)


def test_samples_with_counts_are_collated_to_the_count_in_each() -> None:
    """torch would add the first sample's counts to all, and leave out what that sample has not counted."""
    samples = [{"words": Counter(a=1)}, {"words": Counter(a=2, b=4)}]
    for batch in fetched(Samples(lambda index: samples[index % 2]), collate=Job.collate.__get__(Job)):
        assert type(batch["words"]) is Counter
        assert repr(dict(batch["words"])) == repr({"a": torch.tensor([1, 2]), "b": torch.tensor([0, 4])})


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, partial(defaultdict, list)])
def test_samples_in_other_mappings_are_collated_as_torch_does(kind: Callable[..., Any]) -> None:
    samples = [kind({"b": i, "a": {"x": torch.ones(2), "n": "text"}}) for i in range(3)]
    found, wanted = Job.collate(Job.__new__(Job), samples), default_collate(samples)
    assert type(found) is type(wanted)
    assert repr(found) == repr(wanted)


class Rows(list[Tensor]):
    """A batch that is a list, and knows more than its elements."""

    def __init__(self, rows: Sequence[Tensor], *, size: int) -> None:
        super().__init__(rows)
        self.size = size


def test_a_list_of_the_jobs_own_class_is_handed_over_whole() -> None:
    batch = next(iter(fetched(Samples(int), collate=lambda samples: Rows([at(4), at(0)], size=len(samples)))))
    assert type(batch) is Rows
    assert batch.size > 0
    assert [tensor.data_ptr() % ALIGNMENT for tensor in batch] == [0, 0]


class Itself:
    """A batch that moves itself, as those of graph libraries do."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: torch.device) -> Itself:
        other = Itself()
        other.x = self.x.to(device)
        return other


def test_an_object_with_a_method_to_is_moved() -> None:
    """Wherever it lies in the batch; a class and a plain object are left alone."""
    meta = torch.device("meta")
    value = {"graphs": [Itself()], "kind": Itself, "name": "a", "x": torch.ones(1)}
    there = map_tensors(value, lambda tensor: tensor.to(meta), lambda other: moved(other, meta))
    assert there["graphs"][0].x.device == there["x"].device == meta
    assert (there["kind"], there["name"]) == (Itself, "a")
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    whole = map_tensors(packed, lambda tensor: tensor.to(meta), lambda other: moved(other, meta))
    assert (whole.data.device, whole.batch_sizes.device) == (meta, CPU)


META = torch.device("meta")
"""Where tensors have a layout and no content: it stands for a GPU."""


class Streams:
    """Stands for CUDA's streams: notes on which one each tensor is copied. As on CUDA, only dense tensors are pinned and recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "compute"
        self.pinned: list[Tensor] = []
        self.recorded: list[Tensor] = []
        self.copied: list[tuple[str, torch.layout]] = []
        to = Tensor.to

        def noted(tensor: Tensor, *args: Any, **more: Any) -> Tensor:
            self.copied.append((self.current, tensor.layout))
            return to(tensor, *args, **more)

        def pin(tensor: Tensor) -> Tensor:
            if tensor.device != CPU:
                raise RuntimeError("cannot pin: only dense CPU tensors can be pinned")
            self.pinned.append(tensor)
            return tensor

        def record(tensor: Tensor, stream: Any) -> None:
            if tensor.layout != torch.strided or tensor.device == CPU:
                raise NotImplementedError("Could not run 'aten::record_stream'")
            self.recorded.append(tensor)

        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(Tensor, "pin_memory", pin)
        monkeypatch.setattr(Tensor, "record_stream", record)
        monkeypatch.setattr(Tensor, "to", noted)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.current = "copies"
        yield
        self.current = "compute"

    def record_event(self) -> str:
        return "copied"

    def wait_event(self, event: Any) -> None:
        assert event == "copied"


def coo() -> Tensor:
    return torch.sparse_coo_tensor([[0, 1], [1, 0]], [3.0, 4.0], (2, 2), check_invariants=True).coalesce()


SPARSE: list[Callable[[], Tensor]] = [coo, lambda: coo().to_sparse_csr(), lambda: coo().to_sparse_csc()]

quiet_about_sparse = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
"""Torch says once in a process that its sparse tensors are in beta state and unchecked."""


@quiet_about_sparse
@pytest.mark.parametrize("sparse", SPARSE, ids=["coo", "csr", "csc"])
def test_a_batch_may_lie_on_the_gpu_or_hold_sparse_tensors(
    monkeypatch: pytest.MonkeyPatch, sparse: Callable[[], Tensor]
) -> None:
    """A dense tensor is copied ahead, out of pinned memory; a sparse one on the stream that computes; one that is there stays there."""
    there = torch.ones(3, device=META)

    def collate(samples: Sequence[int]) -> dict[str, Any]:
        return {"dense": torch.ones(2), "sparse": [sparse()], "there": there}

    batches = MicroBatches(Samples(int), collate, seed=3, purpose="data")
    streams = Streams(monkeypatch)
    (batch,) = Loader(batches, KEYS[:1], META)
    assert batch["there"] is there
    assert [t.device for t in (batch["dense"], batch["sparse"][0])] == [META] * 2
    assert batch["sparse"][0].layout == sparse().layout
    assert [(t.layout, t.shape) for t in streams.pinned] == [(torch.strided, (2,))]
    assert any(t is batch["dense"] for t in streams.recorded)
    assert streams.copied == [("copies", torch.strided), ("compute", sparse().layout)]


@quiet_about_sparse
@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("sparse", SPARSE, ids=["coo", "csr", "csc"])
def test_sparse_tensors_are_handed_over(sparse: Callable[[], Tensor], processes: int) -> None:
    for batch in fetched(Samples(int), collate=lambda samples: sparse(), processes=processes):
        assert batch.layout == sparse().layout
        assert torch.equal(batch.to_dense(), coo().to_dense())


def test_waiting_is_measured() -> None:
    loader = Loader(MicroBatches(Samples(int), list, seed=3, purpose="data"), KEYS, CPU)
    assert loader.waited_s == 0.0
    list(loader)
    assert loader.waited_s > 0.0


class Garbage:
    """Unreachable but for the collector; tells in which process it was destroyed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.itself = self

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_loader_process_destroys_nothing_of_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    """A destructor that waits for its process's threads, such as a process group's, would hang there. Not frozen, it runs."""
    if not frozen:
        monkeypatch.setattr(loader_module.gc, "freeze", lambda: None)
    gc.collect()
    gc.disable()
    try:
        Garbage(tmp_path)
        collected = list[int]()  # of a process: it collects once, for that takes long where much is loaded

        def collecting(index: int) -> torch.Tensor:
            if not collected:
                collected.append(gc.collect())
            return torch.tensor(index)

        fetched(Samples(collecting), processes=2)
        assert not (tmp_path / str(os.getpid())).exists()
    finally:
        gc.enable()
    assert len(list(tmp_path.iterdir())) == (0 if frozen else 2)
    gc.collect()
    assert (tmp_path / str(os.getpid())).exists()


class Remembers:
    """Leaves behind what it has computed when it is pickled."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.squared: int | None = number**2

    def __getstate__(self) -> dict[str, Any]:
        return {"number": self.number, "squared": None}


@pytest.mark.parametrize("processes", [0, 2])
def test_a_micro_batch_that_is_fetched_here_as_well_is_the_same(processes: int) -> None:
    """Every one of them, whatever it holds; nothing of it is seen in what the loader gives."""

    def sample(index: int) -> Any:
        return {"drawn": drawn(index), "held": Remembers(index), "ids": (index, str(index))}

    dataset = MicroBatches(Samples(sample), list, seed=3, purpose="data")
    loader = Loader(dataset, KEYS, CPU, processes, compared=lambda key: True)
    compared = list(loader)
    loader.close()
    alone = fetched(Samples(sample), collate=list)
    assert [torch.equal(a["drawn"], b["drawn"]) for x, y in zip(compared, alone, strict=True) for a, b in zip(x, y, strict=True)] == [True] * 12  # fmt: skip


def test_a_micro_batch_that_depends_on_its_process_is_refused() -> None:
    facts = {
        "where": re.compile("^step 1, micro-batch 0, differs "),
        "advice": re.compile("or on the process"),
    }
    with raises(problems.PROCESSES_DIFFER, got=1, **facts):
        dataset = MicroBatches(Samples(lambda _: os.getpid()), list, seed=3, purpose="data")
        loader = Loader(dataset, KEYS, CPU, 1, compared=lambda key: True)
        try:
            next(loader)
        finally:
            loader.close()


def test_a_micro_batch_that_was_fetched_ahead_of_a_change_is_refused() -> None:
    """As on a GPU, where the next one is copied while a step computes."""
    stage = [0]
    loader = Loader(MicroBatches(Samples(lambda index: stage[0]), list, seed=3, purpose="data"), KEYS, CPU)
    batch = next(loader)
    loader._compare(KEYS[0], batch)
    stage[0] = 1
    with raises(problems.FETCHED_AHEAD, where=re.compile("^step 1, micro-batch 0, differs ")):
        loader._compare(KEYS[0], batch)


def test_an_error_of_what_is_fetched_here_as_well_is_told() -> None:
    here = os.getpid()

    def sample(index: int) -> int:
        if os.getpid() == here:
            raise ValueError("torn")
        return index

    loader = Loader(
        MicroBatches(Samples(sample), list, seed=3, purpose="data"), KEYS, CPU, 1, compared=lambda key: True
    )
    where = {"what": "sample 0", "where": "step 1, micro-batch 0"}
    with raises(problems.FETCH_FAILED, **where, kind="ValueError", got=re.compile("^torn")):
        next(loader)
    loader.close()


# --- what is open, and what threads there are, when loader processes are forked -------------------------------


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.bin"
    np.arange(4800, dtype=np.float32).tofile(path)
    return path


MANY = [MicroBatch(0, m, list(range(24 * m, 24 * m + 24))) for m in range(200)]
"""Micro-batches of so many samples that two processes read at once."""


class OfAFile(Dataset[Any]):
    """Numbers read by position from a file that is opened at the first fetch, or before it."""

    def __init__(self, path: Path, *, buffered: bool, mode: str = "rb", eager: bool = False) -> None:
        self.path, self.mode, self.buffering = path, mode, -1 if buffered else 0
        self.file: Any = self.opened() if eager else None

    def opened(self) -> Any:
        return self.path.open(self.mode, buffering=self.buffering)

    def __len__(self) -> int:
        return 4800

    def __getitem__(self, index: int) -> Tensor:
        if self.file is None:
            self.file = self.opened()
        self.file.seek(4 * index)
        time.sleep(0)  # lets another process come between
        return torch.tensor(np.frombuffer(self.file.read(4), np.float32)[0])


def fetched_after_a_look(
    samples: Dataset[Any], processes: int, keys: Sequence[MicroBatch] | None = None
) -> Tensor:
    """All of it, after the process itself has fetched one micro-batch, as a run does before its first step."""
    keys = MANY if keys is None else keys
    fetched(samples, keys=keys[-1:])
    return torch.cat(fetched(samples, processes=processes, keys=keys))


OPENINGS = [
    {"buffered": False},
    {"buffered": True},
    {"buffered": False, "eager": True},
    {"buffered": True, "eager": True},
    {"buffered": True, "mode": "r+b"},
]


@pytest.mark.every(5)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("opening", OPENINGS, ids=str)
def test_loader_processes_read_a_file_that_was_open_before_them(numbers: Path, opening: Any) -> None:
    """Each by a position of its own, whether the dataset opened it as it was made or at its first fetch."""
    samples = OfAFile(numbers, **opening)
    assert torch.equal(fetched_after_a_look(samples, 2), torch.arange(4800.0))
    samples.file.close()


def test_with_one_position_for_all_they_read_other_samples(
    numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: processes that share what was open before them."""
    monkeypatch.setattr(loader_module.fork_isolation, "separate_from_parent", lambda opened: None)
    samples = OfAFile(numbers, buffered=False)
    try:
        got = fetched_after_a_look(samples, 2)
    except JobError:  # one that has read at the end of the file
        return
    finally:
        samples.file.close()
    assert not torch.equal(got, torch.arange(4800.0))


def test_what_a_reader_holds_in_its_buffer_goes_on_where_it_stood(numbers: Path) -> None:
    """Of a file that is read from its beginning to its end, with no seek between."""

    class Onwards(OfAFile):
        def __getitem__(self, index: int) -> Tensor:
            if index == 0:
                self.file = self.opened()
            return torch.tensor(np.frombuffer(self.file.read(4), np.float32)[0])

    samples = Onwards(numbers, buffered=True)
    fetched(samples, keys=MANY[:1])
    assert torch.equal(torch.cat(fetched(samples, processes=1, keys=MANY[1:])), torch.arange(24.0, 4800.0))
    assert torch.equal(torch.cat(fetched(samples, keys=MANY[1:])), torch.arange(24.0, 4800.0)), "nor here"
    samples.file.close()


def test_a_file_that_cannot_be_opened_again_is_told(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, by the sample that is read from it: it is not read by a position that others move."""

    def refuses(path: Any, *arguments: Any, whole: Any = os.open) -> int:
        if str(path).startswith("/proc/self/fd/"):
            raise PermissionError(13, "Permission denied")
        return int(whole(path, *arguments))

    samples = OfAFile(numbers, buffered=False)
    fetched(samples, keys=MANY[:1])
    monkeypatch.setattr(loader_module.fork_isolation.os, "open", refuses)
    with pytest.raises(JobError) as info:
        fetched(samples, processes=1, keys=MANY[:1])
    text = one_line(info.value)
    assert text.startswith("data: sample 0 failed (step 1, micro-batch 0, tests/unit/data/test_loader.py:")
    assert f"the file {str(numbers)!r} (Permission denied)" in text
    assert "or set data.loader_processes=0" in text
    samples.file.close()


class Asked(Dataset[Any]):
    """Samples that another process or thread answers, one after another, by a connection that was made before."""

    def __init__(self, ask: Callable[[bytes], bytes]) -> None:
        self.ask = ask

    def __len__(self) -> int:
        return 4800

    def __getitem__(self, index: int) -> Tensor:
        answer = self.ask(f"{index:07}\n".encode())
        if not answer:
            raise ConnectionError("the server has hung up")
        return torch.tensor(float(answer))


def answered(connection: socket.socket) -> None:
    """Give back each line that is received."""
    with connection:
        while line := connection.recv(8, socket.MSG_WAITALL):
            connection.sendall(line)


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answered, args=[listening.accept()[0]], daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()
        listening.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_was_made_before_loader_processes_is_told(server: tuple[str, int]) -> None:
    """Two that asked by one connection would get each other's answers. The process itself goes on with it."""
    with socket.create_connection(server) as connection:

        def ask(line: bytes) -> bytes:
            connection.sendall(line)
            return connection.recv(8, socket.MSG_WAITALL)

        samples = Asked(ask)
        fetched(samples, keys=MANY[:1])
        with pytest.raises(JobError) as info:
            fetched(samples, processes=2, keys=MANY)
        assert f"the connection to ('127.0.0.1', {server[1]})" in one_line(info.value)
        assert "in each process (os.getpid()) its own" in str(info.value)
        assert torch.equal(torch.cat(fetched(samples, keys=MANY)), torch.arange(4800.0))


def test_a_client_that_connects_anew_is_right_in_loader_processes(server: tuple[str, int]) -> None:
    held: list[socket.socket] = []

    def ask(line: bytes) -> bytes:
        for _ in range(2):
            with suppress(ConnectionError):
                held[:] = held or [socket.create_connection(server)]
                held[0].sendall(line)
                if answer := held[0].recv(8, socket.MSG_WAITALL):
                    return answer
            held.pop().close()
        raise AssertionError

    assert torch.equal(fetched_after_a_look(Asked(ask), 2), torch.arange(4800.0))
    held[0].close()


def test_another_error_says_nothing_of_what_was_open(server: tuple[str, int]) -> None:
    """One of a file that is missing, say, while some connection was open."""
    with socket.create_connection(server), pytest.raises(JobError, match="No such file") as info:
        fetched(Samples(lambda index: Path(f"/nowhere/{index}").read_text()), processes=1)
    assert "was open before" not in str(info.value)


def test_a_process_that_answers_by_pipes_is_told() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as cat:

        def ask(line: bytes) -> bytes:
            assert cat.stdin is not None and cat.stdout is not None
            cat.stdin.write(line)
            answer: bytes = cat.stdout.read(8)
            if not answer:
                raise EOFError
            return answer

        fetched(Asked(ask), keys=MANY[:1])
        with pytest.raises(JobError, match=r"EOFError: no message; a loader process cannot read .*a pipe"):
            fetched(Asked(ask), processes=1, keys=MANY[:1])


class InThreads(Dataset[Any]):
    """Samples that a pool of threads reads, which is made with the dataset or at its first fetch."""

    def __init__(self, *, eager: bool) -> None:
        self.pool: ThreadPoolExecutor | None = ThreadPoolExecutor(3) if eager else None

    def __len__(self) -> int:
        return 4800

    def __getitems__(self, ids: Sequence[int]) -> list[Tensor]:
        self.pool = self.pool or ThreadPoolExecutor(3)
        return list(self.pool.map(torch.tensor, map(float, ids)))


@pytest.mark.parametrize("processes", [0, 1])
def test_samples_that_a_fetch_of_many_leaves_out_are_missed(processes: int) -> None:
    """They would not be trained on, and the record would name their ids. The control has them all."""
    missed = raises(problems.OTHER_COUNT, dataset="Short", got=1, samples="samples 4, 5", wanted=2)
    for samples, refused in ((Whole(float), nullcontext()), (Short(float), missed)):
        loader = Loader(MicroBatches(samples, default_collate, seed=0, purpose="data"), KEYS, CPU, processes)
        try:
            with refused:
                assert [batch.tolist() for batch in loader] == [key.ids for key in KEYS]
        finally:
            loader.close()


@pytest.mark.every(2)
@pytest.mark.parametrize("eager", [False, True])
def test_a_pool_of_threads_starts_new_ones_in_loader_processes(eager: bool) -> None:
    samples = InThreads(eager=eager)
    for processes in (2, 0, 1):
        assert torch.equal(fetched_after_a_look(samples, processes), torch.arange(4800.0))
    assert samples.pool is not None
    samples.pool.shutdown()


def filled_by_a_thread() -> tuple[queue.Queue[Any], Samples]:
    """Samples that a thread puts into a queue as they are asked for."""
    asked, given = queue.Queue[Any](), queue.Queue[Any]()

    def fill() -> None:
        while (index := asked.get()) is not None:
            given.put(torch.tensor(float(index)))

    threading.Thread(target=fill).start()

    def sample(index: int) -> Tensor:
        asked.put(index)
        value: Tensor = given.get()
        return value

    return asked, Samples(sample)


def test_a_wait_for_a_thread_that_a_loader_process_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module.fork_isolation, "LOOKS_S", 0.2)
    asked, samples = filled_by_a_thread()
    fetched(samples)
    with pytest.raises(JobError) as info:
        fetched(samples, processes=2)
    text = one_line(info.value)
    assert text.startswith("data: sample 0 failed (step 1, micro-batch 0, tests/unit/data/test_loader.py:")
    assert "waits for a thread of the process that this loader process was forked from" in text
    assert len(fetched(samples)) == len(KEYS)
    asked.put(None)


def test_a_wait_for_a_thread_that_works_is_none_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module.fork_isolation, "LOOKS_S", 0.05)

    def sample(index: int) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(time.sleep, 0.12).result()
        time.sleep(0.12)
        return torch.tensor(float(index))

    assert torch.equal(torch.cat(fetched(Samples(sample), processes=2)), torch.arange(12.0))
