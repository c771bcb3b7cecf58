"""The job's data, opened: both datasets under one seed, and checked for what training can read."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data
from torch.utils.data import Dataset

from lockstep.communication.group import Group
from lockstep.data import problems as data_problems
from lockstep.data.dataset import (
    dataset_lengths,
    expects_epochs,
    is_lit_dataset,
    is_map_style,
    is_ray_dataset,
    orders_itself,
)
from lockstep.data.dataset_order import number_of_ids
from lockstep.data.order import Ids
from lockstep.data.sampler import MicroBatchSampler
from lockstep.data.table_pins import Pins, in_force
from lockstep.job.inputs.imports import imports_of_job
from lockstep.job.interface import Job
from lockstep.plan import Plan
from lockstep.randomness import datasets_key, seed_all
from lockstep.spec.fields import Spec
from lockstep.training import problems
from lockstep.training.failure import job_at


class JobData(NamedTuple):
    """The datasets of a job, opened."""

    train: Dataset[Any]
    held_out: Mapping[str, Dataset[Any]]
    """By the label that the names of their metrics begin with: `eval`, `eval/<set>`, `test`, `test/<set>`."""

    @property
    def evaluated(self) -> Mapping[str, Dataset[Any]]:
        """Those of `eval_data`."""
        return {label: data for label, data in self.held_out.items() if not is_test(label)}


def is_test(label: str) -> bool:
    """Whether a label, or the name of a metric, is that of `test_data`."""
    return label.partition("/")[0] == "test"


def shown_label(label: str) -> str:
    """What a job calls a set: `eval_data`, or `eval_data['clean']` for `eval/clean`."""
    kind, _, name = label.partition("/")
    return f"{kind}_data[{name!r}]" if name else f"{kind}_data"


def open_data(job: Job, seed: int, group: Group | None = None) -> JobData:
    """`train_data`, `eval_data` and `test_data` of a job, the generators seeded alike before each, also that of a CUDA device.

    So a split that two of them draw, by `random_split` say, is one split. The ranks of a `group` call it together: what has to be written before
    it can be read by index, one of each node writes. Raises JobError for what the job raises or returns.
    """
    alone = group or Group(0, 1, torch.device("cpu"))
    device = None if group is None else group.device
    with job_at("while its data were opened"), imports_of_job(job):
        seed_all(datasets_key(seed), device)
        train_data = _by_index(job.train_data(), alone)
        held_out: dict[str, Any] = {}
        for kind, method in (("eval", job.eval_data), ("test", job.test_data)):
            seed_all(datasets_key(seed), device)
            for label, data in _labelled(kind, method()):
                held_out[label] = _by_index(data, alone)
    _check(train_data, "train_data")
    for label, data in held_out.items():
        _check(data, shown_label(label))
        _check_evaluated(data, shown_label(label))
    return JobData(train_data, held_out)


_NAME = re.compile(r"[A-Za-z0-9_-]+")


def _labelled(kind: str, returned: Any) -> Iterator[tuple[str, Any]]:
    """The sets that a method returns, by their labels."""
    if returned is None:
        return
    if not isinstance(returned, Mapping):
        yield kind, returned
        return
    if not returned:
        raise problems.NO_SET(field=f"job.{kind}_data")
    for name, data in returned.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise problems.SET_NAME(field=f"job.{kind}_data", got=name)
        yield f"{kind}/{name}", data


def _by_index(data: Any, group: Group) -> Any:
    """A dataset of another library, so that its samples can be read by index; any other as it is."""
    if is_lit_dataset(data):
        from lockstep.data.indexed_shards import LitShards

        return LitShards(data)
    if not is_ray_dataset(data):
        return data
    from lockstep.data.ray_rows import written_rows
    from lockstep.data.tables import Table

    nodes = group.gather(socket.gethostname())
    writers = [nodes.index(node) for node in nodes]
    is_writer = writers[group.rank] == group.rank
    written = group.gather(group.together(lambda: str(written_rows(data)) if is_writer else ""))
    path = written[writers[group.rank]]
    # Containers of one node may share its name and no disk.
    return Table(path if Path(path).exists() else written_rows(data))


def open_agreed(job: Job, seed: int, group: Group, versions: Mapping[str, str]) -> tuple[JobData, Pins]:
    """`open_data` on every rank. Tables that change are read in these `versions`, or where none is given in the newest that rank 0 has found.

    Returns the pins as well: they have all versions, and hold for what the job opens later on.
    """
    with in_force() as pins:
        pins.fixed.update(versions)
        data = open_data(job, seed, group)
        every = group.gather(pins.opened)
        # Where someone wrote into a table while the ranks opened it, all open theirs again: they may need each other for it.
        if any(opened != every[0] for opened in every):
            pins.opened.clear()
            pins.fixed.update(every[0])
            data = open_data(job, seed, group)
    return data, pins


def dataset_size(dataset: Dataset[Any], name: str) -> int:
    """Number of samples of a map-style dataset; JobError for one without a length."""
    if not hasattr(type(dataset), "__len__"):
        raise problems.NO_LENGTH(name=name, got=type(dataset).__name__)
    with job_at(f"in __len__ of {type(dataset).__name__}, {name}"):
        return len(dataset)  # type: ignore[arg-type]


def lengths_of(job: Job, dataset: Dataset[Any], samples: int) -> Ids:
    """The length of each training sample, from the job or the dataset. JobError where neither knows them, SpecError for a dataset with an order of its own."""
    name = type(dataset).__name__
    if orders_itself(dataset):
        raise data_problems.LENGTHS_OWN_ORDER(name=name)
    with job_at("while the lengths of its samples were asked for"), imports_of_job(job):
        given = job.lengths(dataset)
        if given is None:
            given = dataset_lengths(dataset)
        if given is None:
            raise data_problems.NO_LENGTHS(name=name)
        lengths = np.asarray(given)
    if lengths.shape != (samples,) or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        least = int(lengths.min()) if lengths.dtype.kind in "iu" and lengths.size else "none"
        raise data_problems.LENGTHS_FORM(
            name=name, shape=lengths.shape, dtype=lengths.dtype, least=least, samples=samples
        )
    return lengths.astype(np.int64)


def make_sampler(
    spec: Spec,
    plan: Plan,
    samples: Dataset[Any],
    assigned: range | Callable[[int], range] | None = None,
    start: int = 0,
) -> MicroBatchSampler:
    """The sampler of a worker that runs the micro-batches `assigned` of each step, or of a step of so many (None: all), from step `start` on."""
    return MicroBatchSampler(
        samples,
        plan,
        range(plan.micro_batches) if assigned is None else assigned,
        seed=spec.seed,
        shuffle=spec.data.shuffle,
        window=spec.data.window,
        start=start,
        without=spec.data.without,
        guard=job_at,
    )


def warnings_of(train_data: object) -> list[str]:
    """Warnings about data that likely does not behave as meant."""
    if not expects_epochs(train_data):
        return []
    return [
        f"data: nothing calls set_epoch() of {type(train_data).__name__}, so its epoch stays the first one; "
        "the order differs in every epoch anyway (data.shuffle), and so do random draws at every fetch"
    ]


def check_rules(spec: Spec, data: JobData) -> None:
    """SpecError for a rule that needs a metric of the evaluation where the job has no `eval_data`, and for a set that it does not give."""
    names = [label.partition("/")[2] for label in data.evaluated]
    if unknown := sorted(spec.evaluate.sets.keys() - set(names)):
        raise problems.UNKNOWN_SET(
            field=f"evaluate.sets.{unknown[0]}", wanted=", ".join(filter(None, names)) or "no set with a name"
        )
    if not names and (spec.early_stop is not None or spec.checkpoint.keep_best is not None):
        name = "early_stop" if spec.early_stop is not None else "checkpoint.keep_best"
        raise problems.NO_EVAL_DATA(field=name)


def _check_evaluated(data: Any, name: str) -> None:
    """JobError where an evaluation, which takes the ids from 0 to the data's length, would not take each sample once."""
    kind = type(data).__name__
    with job_at(f"in id_count of {kind}, {name}"):
        ids = number_of_ids(data) if orders_itself(data) else None
    if ids is not None and ids != (size := dataset_size(data, name)):
        raise problems.DRAWS_EPOCHS(name=name, kind=kind, got=size, wanted=ids)


def _check(data: object, name: str) -> None:
    """JobError for anything but a map-style dataset."""
    kind = type(data).__name__
    if isinstance(data, torch.utils.data.DataLoader):
        raise problems.NO_MAP_STYLE(
            name=name, got="a DataLoader", remedy="return its dataset: Lockstep makes the batches"
        )
    if isinstance(data, torch.utils.data.IterableDataset):
        raise problems.NO_MAP_STYLE(
            name=name,
            got=f"{kind}, an IterableDataset, whose samples have no index, so a resume or several workers could not find their position in it",
            remedy="return such as lockstep.data.TarShards for tar files and lockstep.data.Table for Parquet",
        )
    if (
        isinstance(data, tuple)
        and data
        and all(isinstance(part, torch.Tensor | np.ndarray | Dataset) for part in data)
    ):
        raise problems.NO_MAP_STYLE(
            name=name,
            got=f"a tuple of {len(data)} {type(data[0]).__name__}s",
            remedy="put tensors side by side with torch.utils.data.TensorDataset(...)",
        )
    if not is_map_style(data):
        raise problems.NO_MAP_STYLE(
            name=name, got=kind, remedy="return such as a torch.utils.data.Dataset or a list of samples"
        )
