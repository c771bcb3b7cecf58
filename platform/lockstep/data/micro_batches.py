"""A dataset seen as micro-batches: fetched and collated whole, after a seed of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from lockstep.data import fork_isolation, problems
from lockstep.data.dataset import draws_nothing, in_memory, is_batched, reads_ahead
from lockstep.data.mixture import Mixture
from lockstep.data.order import Ids
from lockstep.data.sampler import MicroBatch
from lockstep.errors import LockstepError
from lockstep.failure_kinds import may_pass
from lockstep.job.frames import place_in_job
from lockstep.job.interface import Job
from lockstep.randomness import Draws, fetch_key, seed_all
from lockstep.threads import one_thread


class MicroBatches(Dataset[Any]):
    """A job's dataset seen as micro-batches: indexed by MicroBatch, giving the collated samples."""

    def __init__(
        self,
        samples: Dataset[Any],
        collate: Callable[[Sequence[Any]], Any],
        *,
        seed: int,
        purpose: Literal["data", "eval data"],
    ) -> None:
        self.samples = samples
        self.collate = collate
        self.seed = seed
        self.purpose = purpose
        self.fetch_many: Callable[[Any], Any] | None = samples.__getitems__ if is_batched(samples) else None
        self.draws_nothing = draws_nothing(samples)
        self.in_memory = in_memory(samples)
        self.collates_as_torch = getattr(collate, "__func__", None) is Job.collate

    def __getitem__(self, batch: MicroBatch) -> Any:
        """The collated micro-batch, None for one without samples; or the error, as a value, so that it leaves a loader process as it is."""
        if not len(batch.ids):
            return None
        seed_all(fetch_key(self.seed, self.purpose, batch.step, batch.micro_batch))
        try:
            with one_thread():
                rows = self._gathered(batch)
                return self._collated(batch, self.fetched(batch)) if rows is None else rows
        except LockstepError as error:
            return error

    def collated(self, batch: MicroBatch, fetched: Future[Any]) -> Any:
        """The collated micro-batch of samples that were fetched without a seed, for their fetch draws nothing; the collation may draw."""
        if not len(batch.ids):
            return None
        seed_all(fetch_key(self.seed, self.purpose, batch.step, batch.micro_batch))
        try:
            with one_thread():
                return self._collated(batch, fetched.result())
        except LockstepError as error:
            return error

    def fetched(self, batch: MicroBatch) -> Any:
        """The samples, before they are collated. Raises the dataset's errors with their ids."""
        samples: list[Any] = []
        if not len(batch.ids):
            return samples
        try:
            if self.fetch_many is not None:
                samples = self.fetch_many(batch.ids)
                if isinstance(samples, list | tuple) and len(samples) != len(batch.ids):
                    raise problems.OTHER_COUNT(
                        dataset=type(self.samples).__name__,
                        got=len(samples),
                        samples=_named(batch.ids),
                        where=_where(batch),
                        wanted=len(batch.ids),
                    )
                if batch.due and reads_ahead(self.samples):
                    self.samples.read_ahead(batch.due)
                return samples
            fetch = self.samples.__getitem__
            for sample_id in batch.ids:
                samples.append(fetch(sample_id))  # their number tells which one failed
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:  # a dataset may end the process
            label = self._label(batch.ids[len(samples)]) if self.fetch_many is None else _named(batch.ids)
            raise _data_error(error, batch, label) from error
        return samples

    def _label(self, sample_id: int) -> str:
        """A sample in a message; one of a mixture also by its source, where its author looks for it."""
        if not isinstance(self.samples, Mixture):
            return f"sample {sample_id}"
        name, index = self.samples.source_of(sample_id)
        return f"sample {sample_id} (sample {index} of source {name!r})"

    def _gathered(self, batch: MicroBatch) -> list[Tensor] | None:
        """What torch's collation makes of the rows of a TensorDataset, without a tensor for each row; None where the result might differ.

        Checked for each micro-batch: a job may give its dataset other tensors, its subset other indices, or torch another collation, at any time.
        """
        if not self.collates_as_torch or not _is_torchs_own():
            return None
        samples: Any = self.samples
        ids = batch.ids
        try:
            while _is_just(samples, Subset) and isinstance(samples.indices, list | range | np.ndarray):
                samples, ids = samples.dataset, [samples.indices[i] for i in ids]
            if not _is_just(samples, TensorDataset) or not all(map(_is_gathered, samples.tensors)):
                return None
            rows = torch.from_numpy(np.array(ids))  # a fifth of the time of torch.tensor
            return [tensor.index_select(0, rows) for tensor in samples.tensors]
        except (IndexError, RuntimeError, TypeError, ValueError):
            return None  # such as a negative index: to be taken, or to fail, sample by sample

    def check_draws_nothing(self, batch: MicroBatch) -> None:
        """JobError for a dataset that says `draws_nothing` and draws: its thread has no seed, and would take from the training's numbers."""
        if not self.draws_nothing:
            return
        seed_all(fetch_key(self.seed, self.purpose, batch.step, batch.micro_batch))
        initial_state, draws = Draws().state(), Draws()
        with one_thread():
            self.fetched(batch._replace(due=()))
        if draws.state() == initial_state:
            return
        raise problems.DRAWS(dataset=type(self.samples).__name__, samples=_named(batch.ids))

    def _collated(self, batch: MicroBatch, samples: Any) -> Any:
        try:
            collated = self.collate(samples)
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:
            raise _data_error(error, batch, f"the collation of {_named(batch.ids)}") from error
        if collated is None:  # which means a micro-batch without samples
            raise problems.NO_BATCH(samples=_named(batch.ids), where=_where(batch))
        return collated


def _is_just(samples: Any, kind: type) -> bool:
    """Whether a dataset is of this class itself, and fetches as the class does."""
    return type(samples) is kind and vars(samples).keys().isdisjoint(("__getitem__", "__getitems__"))


def _is_torchs_own() -> bool:
    """Whether torch's datasets fetch, and torch's collation stacks, by torch's own functions: a job may have put others in their place."""
    functions = (
        TensorDataset.__getitem__,
        Subset.__getitem__,
        Subset.__getitems__,
        default_collate_fn_map.get(Tensor),
    )
    return all(getattr(func, "__module__", "").startswith("torch.utils.data.") for func in functions) and not any(
        isinstance((), kind) for kind in default_collate_fn_map
    )  # fmt: skip


def _is_gathered(tensor: Tensor) -> bool:
    """Whether rows that are gathered from it have the bits and the strides of rows that are taken from it and stacked."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )  # fmt: skip


def _data_error(error: BaseException, batch: MicroBatch, label: str) -> LockstepError:
    """What the job's code raised, with the samples and the step; its kind is found here, for an error of a loader process arrives without its cause."""
    text, forked = " ".join(str(error).split()) or "no message", fork_isolation.explanation(error)
    failed = problems.FETCH_FAILED(
        what=label,
        where=_where(batch),
        location=place_in_job(error),
        kind=type(error).__name__,
        got=text,
        forked=forked,
    )
    failed.__cause__ = error
    return failed if forked else may_pass(failed)


def _where(batch: MicroBatch) -> str:
    if batch.step < 0:
        return f"evaluation micro-batch {batch.micro_batch}"
    return f"step {batch.step_number}, micro-batch {batch.micro_batch}"


def _named(ids: Sequence[int] | Ids) -> str:
    return f"samples {', '.join(map(str, ids[:8]))}{', …' if len(ids) > 8 else ''}"
