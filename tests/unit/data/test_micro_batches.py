"""Rows of a TensorDataset are gathered whole, and nothing tells it from torch's collation of them one by one."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, random_split
from torch.utils.data._utils.collate import default_collate_fn_map

import lockstep
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import MicroBatch
from lockstep.errors import JobError, TransientStorageError
from lockstep.job.interface import Job

ROWS = 12

KEY = MicroBatch(step=0, micro_batch=0, ids=[5, 3, 3, 9, 0], due=[])

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "of numbers": lambda flat: flat[:ROWS],
    "of rows": lambda flat: flat.view(ROWS, -1),
    "of images": lambda flat: flat.view(ROWS, 2, 4, 4),
    "channels last": lambda flat: flat.view(ROWS, 2, 4, 4).to(memory_format=torch.channels_last),
    "transposed": lambda flat: flat.view(-1, ROWS).t(),
    "every second": lambda flat: flat.view(2 * ROWS, -1)[::2],
    "expanded": lambda flat: flat[:ROWS].view(ROWS, 1).expand(ROWS, 3),
    "without columns": lambda flat: flat.view(ROWS, -1)[:, :0],
}


def batches(samples: Dataset[Any], collate: Callable[[Any], Any] | None = None) -> MicroBatches:
    return MicroBatches(samples, collate or Job(None).collate, seed=3, purpose="data")


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    """Any bits: negative zeros, infinities and payloads of NaNs among them."""
    flat = torch.randint(
        256, (ROWS * 32 * 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return ((flat % 2).bool() if dtype is torch.bool else flat.view(dtype))[: ROWS * 32]


def same(a: Any, b: Any) -> bool:
    """Whether two micro-batches are the same types, shapes, strides and bytes."""
    if isinstance(a, Tensor):
        told = [(type(t), t.dtype, t.shape, t.stride(), t.requires_grad) for t in (a, b)]
        return told[0] == told[1] and torch.equal(as_bytes(a), as_bytes(b))
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


def as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_rows_are_stacked_ones(dtype: torch.dtype, layout: str) -> None:
    tensor = LAYOUTS[layout](numbers(dtype))
    samples = TensorDataset(tensor, torch.arange(ROWS))
    found = batches(samples)[KEY]
    assert same(found, default_collate([samples[i] for i in KEY.ids]))
    assert found[0].untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


SUBSETS: dict[str, Callable[[Dataset[Any]], Dataset[Any]]] = {
    "of a list": lambda data: Subset(data, [11, 2, 2, 7, 5, 1, 0, 3, 4, 6]),
    "of a range": lambda data: Subset(data, range(11, 0, -1)),
    "of an array": lambda data: Subset(data, np.random.default_rng(1).permutation(ROWS).astype(np.int32)),
    "of a subset": lambda data: Subset(Subset(data, range(1, 12)), [10, 2, 2, 7, 5, 1, 0, 3, 4, 6]),
    "split at random": lambda data: random_split(data, [10, 2], torch.Generator().manual_seed(1))[0],
    "from the end": lambda data: Subset(data, [-1, -2, 3, -4, 5, 6, 7, 8, 9, -12]),
    "of a tensor": lambda data: Subset(data, torch.arange(ROWS).flip(0)),  # type: ignore[arg-type]
}
TAKEN_ONE_BY_ONE = {"from the end", "of a tensor"}


@pytest.mark.parametrize("subset", SUBSETS)
def test_rows_of_a_subset_are_its_rows(subset: str) -> None:
    samples = SUBSETS[subset](TensorDataset(numbers().view(ROWS, -1), torch.arange(ROWS)))
    seen = batches(samples)
    assert same(seen[KEY], default_collate([samples[i] for i in KEY.ids]))
    assert (seen._gathered(KEY) is None) == (subset in TAKEN_ONE_BY_ONE)


class Noisy(TensorDataset):
    """One that changes what it gives."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor + torch.rand(()) for tensor in super().__getitem__(index))


class Chosen(Subset[Any]):
    """The same for a subset."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)[:1]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Marked(Tensor):
    """A tensor of the job's own class."""


class OwnCollate(lockstep.Job):
    def collate(self, samples: Sequence[Any]) -> Any:
        return {
            "x": torch.stack([x for (x,) in samples]),
            "samples": len(samples),
            "kind": type(samples).__name__,
        }


def test_what_is_not_torchs_own_is_taken_one_by_one() -> None:
    x = numbers().view(ROWS, -1).nan_to_num(0.5, 1.0, -1.0)
    for samples in (
        Noisy(x),
        Chosen(TensorDataset(x, x), range(ROWS)),
        TensorDataset(x.as_subclass(Marked)),  # type: ignore[arg-type]
        TensorDataset(x.clone().requires_grad_()),
        TensorDataset(torch.view_as_complex(x.view(ROWS, -1, 2)).conj()),
    ):
        seen = batches(samples)
        assert seen._gathered(KEY) is None
        torch.manual_seed(0)
        first = seen[KEY]
        torch.manual_seed(1)
        assert same(first, seen[KEY])  # with the seeds of the micro-batch
        assert type(samples) is Noisy or same(first, default_collate([samples[i] for i in KEY.ids]))
    assert not same(batches(Noisy(x))[KEY], batches(TensorDataset(x))[KEY])
    assert len(batches(Chosen(TensorDataset(x, x), range(ROWS)))[KEY]) == 1


def test_a_collation_of_the_jobs_own_gets_samples() -> None:
    x = numbers().view(ROWS, -1)
    found = batches(TensorDataset(x), OwnCollate(None).collate)[KEY]
    assert (found["samples"], found["kind"]) == (len(KEY.ids), "list")
    assert same(found["x"], batches(TensorDataset(x))[KEY][0])


def test_tensors_and_indices_that_are_replaced_are_seen() -> None:
    x = numbers().view(ROWS, -1)
    whole = TensorDataset(x)
    samples = Subset(whole, range(ROWS))
    seen = batches(samples)
    before = seen[KEY]
    samples.indices = [*range(1, ROWS), 0]
    assert same(seen[KEY][0], x[[6, 4, 4, 10, 1]]) and not same(seen[KEY], before)
    whole.tensors = (x.flip(0),)
    assert same(seen[KEY][0], x.flip(0)[[6, 4, 4, 10, 1]])


def halves(batch: Sequence[Tensor], **_: Any) -> Tensor:
    return torch.stack(list(batch)) / 2


def reversed_rows(*samples: Any) -> list[Any]:
    """Stands in for a fetch of many samples, as a function or as a method."""
    return [(torch.tensor([-float(i)]),) for i in samples[-1]]


def test_what_a_job_puts_in_torchs_place_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(ROWS).float().view(ROWS, 1)
    whole, subset = TensorDataset(x), Subset(TensorDataset(x), range(ROWS))
    plain = batches(whole)[KEY][0]
    with monkeypatch.context() as patch:
        patch.setitem(default_collate_fn_map, Tensor, halves)
        assert torch.equal(batches(whole)[KEY][0], plain / 2)
    with monkeypatch.context() as patch:
        patch.setitem(default_collate_fn_map, tuple, lambda batch, **_: [halves([x for (x,) in batch])])
        assert torch.equal(batches(whole)[KEY][0], plain / 2)
    with monkeypatch.context() as patch:
        patch.setattr(TensorDataset, "__getitem__", lambda self, i: (self.tensors[0][i] + 1,))
        assert torch.equal(batches(whole)[KEY][0], plain + 1)
        assert torch.equal(batches(subset)[KEY][0], plain + 1)
    with monkeypatch.context() as patch:
        patch.setattr(Subset, "__getitems__", reversed_rows)
        assert torch.equal(batches(subset)[KEY][0], -plain)
    own = TensorDataset(x)
    own.__getitems__ = reversed_rows  # type: ignore[attr-defined]
    assert torch.equal(batches(Subset(own, range(ROWS)))[KEY][0], -plain)
    subset.__getitems__ = reversed_rows  # type: ignore[method-assign]
    assert torch.equal(batches(subset)[KEY][0], -plain)
    assert batches(whole)._gathered(KEY) is not None


def test_a_sample_that_a_disk_could_not_give_is_not_the_jobs_mistake() -> None:
    """Also when the error has come from a loader process, without its cause."""

    class Torn(TensorDataset):
        number = errno.EIO

        def __getitem__(self, index: Any) -> Any:
            raise OSError(self.number, os.strerror(self.number))

    samples = Torn(torch.arange(ROWS), torch.arange(ROWS))
    error = pickle.loads(pickle.dumps(batches(samples)[KEY]))
    assert type(error) is TransientStorageError
    assert str(error).startswith("data: sample ")
    samples.number = errno.ENOENT
    assert type(batches(samples)[KEY]) is JobError


def test_a_row_that_is_not_there_is_named() -> None:
    samples = TensorDataset(torch.arange(ROWS), torch.arange(ROWS))
    samples.tensors = (samples.tensors[0], samples.tensors[1][:8])
    error = batches(samples)[KEY]
    assert isinstance(error, JobError)
    assert str(error).startswith("data: sample 9 failed (step 1, micro-batch 0): IndexError: ")
