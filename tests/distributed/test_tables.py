"""Training on tables: G1 wherever the rows are kept and read from, in each order; what may not go unseen."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow.fs import FileSystem

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.communication.group import Group
from lockstep.data import Table
from lockstep.errors import DataError, JobError, SpecError
from lockstep.job.loading import load_job
from lockstep.record.events.union import Event, Warned
from lockstep.spec.loading import load_spec
from lockstep.training import problems
from lockstep.training.determinism import determinism
from lockstep.training.setup import prepare
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.training import Document, Trained, train, train_attempt, train_job
from tests.raised import raises
from tests.unit.checkpoint.conftest import s3  # noqa: F401

RUN = "tabular"
ORDERS = ["full", "hashed", "blocks", "none"]
FEATURES, TRAIN_ROWS, EVAL_ROWS, BLOCK = 8, 1100, 150, 50
BOUND_MB = 8 * BLOCK * (FEATURES + 1) * 4 / 2**20
"""Room for eight blocks of 22."""


def write(folder: Path, rows: int, seed: int, *, by_label: bool = False, files: int = 2) -> str:
    """Points, and whether the first feature is above zero; sorted by that label where asked."""
    folder.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(seed).standard_normal((rows, FEATURES), dtype=np.float32)
    x = x[np.argsort(x[:, 0] > 0, kind="stable")] if by_label else x
    for i, part in enumerate(np.array_split(x, files)):
        table = pa.table(
            {
                "features": pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), FEATURES),
                "label": (part[:, 0] > 0).astype(np.float32),
            }
        )
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=BLOCK)
    return str(folder)


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write(folder / "train", TRAIN_ROWS, 1)
    write(folder / "eval", EVAL_ROWS, 2)
    return folder


def document(tables: Any, shuffle: str = "blocks", processes: int = 0, **params: Any) -> Document:
    """Two epochs of nine steps, the last one ragged, in six micro-batches."""
    return {
        "job": {
            "use": "jobs.tabular.job:Tabular",
            "params": {
                "train": f"{tables}/train",
                "evaluation": f"{tables}/eval",
                "inputs": FEATURES,
                "width": 8,
                **params,
            },
        },
        "seed": 5,
        "batch": {"global": 132, "micro": 22},
        "data": {"shuffle": shuffle, "window": 4, "drop_last": False, "loader_processes": processes},
        "length": {"epochs": 2},
        "optimizer": {"lr": 1e-2},
    }


@cache
def reference(tables: Path, shuffle: str) -> Trained:
    return train(document(tables, shuffle))


@pytest.mark.scenario
@pytest.mark.parametrize(
    "shuffle",
    [order if order == "blocks" else pytest.param(order, marks=pytest.mark.exact) for order in ORDERS],
)
@pytest.mark.parametrize(
    ("workers", "processes"),
    [(3, 1), *(pytest.param(*each, marks=pytest.mark.exact) for each in [(1, 2), (2, 0), (4, 0)])],
)
def test_bits_do_not_depend_on_workers_or_loader_processes(
    pool: Pool, tables: Path, shuffle: str, workers: int, processes: int
) -> None:
    """G1, identity and all."""
    every = pool.run(workers, train, document(tables, shuffle, processes))
    assert every == [reference(tables, shuffle)] * workers


@pytest.mark.scenario
@pytest.mark.parametrize("shuffle", ["blocks", pytest.param("none", marks=pytest.mark.exact)])
@pytest.mark.parametrize(
    ("workers", "processes"),
    [(2, 2), *(pytest.param(*each, marks=pytest.mark.exact) for each in [(1, 0), (2, 0)])],
)
def test_bits_do_not_depend_on_where_the_rows_are_kept(
    pool: Pool, tables: Path, shuffle: str, workers: int, processes: int
) -> None:
    """G1, identity and all: a table above its bound, whose row groups two workers of a node read for each other."""
    for trained in pool.run(workers, train, document(tables, shuffle, processes, memory_mb=BOUND_MB)):
        assert trained == reference(tables, shuffle)


@pytest.mark.scenario
def test_each_order_is_another_run(tables: Path) -> None:
    """Negative control: what the tests here compare tells one order from another."""
    every = [reference(tables, shuffle) for shuffle in ORDERS]
    assert (
        len({trained.weights_digest for trained in every})
        == len({trained.identity for trained in every})
        == 4
    )


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize("shuffle", ORDERS)
def test_a_run_goes_on_with_the_same_bits(pool: Pool, tables: Path, tmp_path: Path, shuffle: str) -> None:
    """From a step amid an epoch, on other workers."""
    whole = reference(tables, shuffle)
    spec = {**document(tables, shuffle), "checkpoint": {"storage": str(tmp_path), "every": None}}
    train_attempt(spec, RUN, AttemptOrigin(), 12)
    resumed = pool.run(3, train_attempt, spec, RUN, taken_up(tmp_path))[0]
    assert (resumed.rows, resumed.weights_digest, resumed.identity) == (
        whole.rows,
        whole.weights_digest,
        whole.identity,
    )
    assert resumed.digests == whole.digests[12:]


def taken_up(storage: Path) -> AttemptOrigin:
    folder = RunFolder.open(open_storage(str(storage)), RUN)
    return AttemptOrigin(RUN, folder.claim().number, None)


@pytest.mark.scenario
def test_a_run_goes_on_with_a_table_that_was_moved(tables: Path, tmp_path: Path) -> None:
    """The fingerprint says what the data are; where they lie is placement."""
    whole = reference(tables, "blocks")
    kept = {"checkpoint": {"storage": str(tmp_path / "runs"), "every": None}}
    shutil.copytree(tables, tmp_path / "old")
    train_attempt({**document(tmp_path / "old"), **kept}, RUN, AttemptOrigin(), 12)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = {**document(tmp_path / "new", memory_mb=BOUND_MB), **kept}
    resumed = train_attempt(moved, RUN, taken_up(tmp_path / "runs"))
    assert (resumed.rows, resumed.weights_digest, resumed.identity) == (
        whole.rows,
        whole.weights_digest,
        whole.identity,
    )


@pytest.mark.scenario
def test_rows_in_both_tables_are_warned_of_and_recorded(pool: Pool, tmp_path: Path) -> None:
    write(tmp_path / "train", TRAIN_ROWS, 1)
    write(tmp_path / "eval", EVAL_ROWS, 2)
    (clean,) = pool.run(1, facts_of, document(tmp_path))
    assert clean == (0, ())
    write(tmp_path / "eval", EVAL_ROWS, 1)
    wanted = (
        f"data: {EVAL_ROWS} of {EVAL_ROWS} evaluation samples are training samples too: the first is evaluation sample 0, training "
        "sample 0; "
        "they flatter every metric: leave them out of one of the two"
    )
    first, second = pool.run(2, facts_of, document(tmp_path))
    assert (first, second) == ((EVAL_ROWS, (wanted,)), (None, ()))
    # What would be read from end to end is left to --dry-run.
    assert pool.run(1, facts_of, document(tmp_path, memory_mb=BOUND_MB)) == [(None, ())]


def facts_of(spec: Document) -> tuple[int | None, tuple[str, ...]]:
    """What is recorded of leaked rows, and what is warned of."""

    def tell(event: Event) -> None:
        if isinstance(event, Warned):
            warnings.append(event.text)

    loaded, warnings = load_spec(spec), list[str]()
    job = load_job(loaded.job.use, loaded.job.params)
    group = Group.join(torch.device("cpu"))
    with determinism(loaded.determinism, loaded.threads):
        facts = prepare(loaded, job, group, tell).facts
    return facts.get("leaked_rows"), tuple(warnings)


def test_a_resume_on_changed_data_is_refused_with_the_file(tmp_path: Path) -> None:
    write(tmp_path / "train", TRAIN_ROWS, 1)
    write(tmp_path / "eval", EVAL_ROWS, 2)
    spec = {**document(tmp_path), "checkpoint": {"storage": str(tmp_path / "runs"), "every": None}}
    train_attempt(spec, RUN, AttemptOrigin(), 4)
    pq.write_table(
        pq.read_table(tmp_path / "train" / "part-1.parquet").slice(1), tmp_path / "train" / "part-1.parquet"
    )
    pq.write_table(
        pa.concat_tables(
            [
                pq.read_table(tmp_path / "train" / "part-1.parquet"),
                pq.read_table(tmp_path / "train" / "part-0.parquet").slice(0, 1),
            ]
        ),
        tmp_path / "train" / "part-1.parquet",
        row_group_size=BLOCK,
    )
    with raises(
        problems.OTHER_IDENTITY,
        name="data.train.file.part-1.parquet",
        got=re.compile("^'550 rows in 11 blocks, "),
        wanted=re.compile("^'550 rows in 11 blocks, "),
    ):
        train_attempt(spec, RUN, taken_up(tmp_path / "runs"))


def test_workers_with_other_data_are_told_which(pool: Pool, tmp_path: Path) -> None:
    for rank, seed in enumerate((1, 3)):
        write(tmp_path / str(rank) / "train", TRAIN_ROWS, seed)
        write(tmp_path / str(rank) / "eval", EVAL_ROWS, 2)
    with raises(problems.IDENTITIES_DIFFER, name="data.train.file.part-0.parquet", rank=1):
        pool.run(2, train_on_own_data, document(tmp_path), str(tmp_path))


def train_on_own_data(spec: Document, folder: str) -> Trained:
    """Each rank finds a folder of its own under one name, as on machines with copies."""
    from unittest import mock

    import torch.distributed as dist

    own = f"{folder}/{dist.get_rank()}"
    opened = Table.__init__

    def open_own(self: Table, source: str, *args: Any, **more: Any) -> None:
        opened(self, source.replace(folder, own), *args, **more)

    with mock.patch.object(Table, "__init__", open_own):
        return train(spec)


@pytest.mark.scenario  # the unit tests read from one, without training
def test_training_from_an_object_store(pool: Pool, tables: Path, s3: str) -> None:  # noqa: F811
    """The same bits through s3://, in memory and by row group, alone and on two workers."""
    files, root = FileSystem.from_uri(f"s3://key:secret@runs/tables?{s3}")
    for path in tables.rglob("*.parquet"):
        with files.open_output_stream(f"{root}/{path.relative_to(tables)}") as out:
            out.write(path.read_bytes())
    where = {part: f"s3://key:secret@runs/tables/{part}?{s3}" for part in ("train", "eval")}
    for memory_mb in (None, BOUND_MB):
        spec = document(tables, memory_mb=memory_mb)
        spec["job"]["params"] |= {"train": where["train"], "evaluation": where["eval"]}
        for trained in (train(spec), *pool.run(2, train, spec)):
            assert trained == reference(tables, "blocks")


@pytest.mark.thinned(3)
@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("shuffle", "learns"), [("full", True), ("hashed", True), ("blocks", True), ("none", False)]
)
def test_a_file_sorted_by_label_is_learnt(tmp_path: Path, shuffle: str, learns: bool) -> None:
    """`blocks` mixes well enough where reading in the file's order fails."""
    write(tmp_path / "train", 6400, 1, by_label=True)
    write(tmp_path / "eval", 400, 2)
    spec = {
        **document(tmp_path, shuffle),
        "data": {"shuffle": shuffle, "window": 8},
        "batch": {"global": 64, "micro": 32},
        "length": {"epochs": 1},
    }
    accuracy = train(spec).summary["metrics"]["eval/accuracy"]
    assert (accuracy > 0.93) == learns, accuracy
    assert learns or accuracy < 0.8


def test_a_bad_table_is_told_as_it_is(tables: Path, tmp_path: Path) -> None:
    spec = document(tables)
    spec["job"]["params"]["train"] = str(tmp_path)
    with pytest.raises(DataError, match=r"^data: there is no file for "):
        train(spec)
    with pytest.raises(SpecError, match=r"^data\.shuffle: got full, but train_data is a table of"):
        train(document(tables, "full", memory_mb=BOUND_MB))


def test_a_dataset_with_a_memory_is_refused() -> None:
    """A micro-batch is fetched twice before training, and must come out the same; under fast it need not."""

    class Remembering(Plain):
        def train_data(self) -> Any:
            data = super().train_data()
            seen = iter(range(10**6))

            class Numbered(torch.utils.data.Dataset[Any]):
                def __len__(self) -> int:
                    return len(data)

                def __getitem__(self, index: int) -> Any:
                    x, y = data[index]
                    return x + next(seen), y

            return Numbered()

    spec: Document = {
        "job": {"use": "tests.distributed.small_jobs:Plain"},
        "batch": {"global": 8, "micro": 4},
    }
    with pytest.raises(
        JobError, match=r"^data: the first micro-batch, fetched twice under one seed, differs in batch\[0\]"
    ):
        train_job(spec, Remembering(Plain.Params()))
    train_job({**spec, "determinism": "fast"}, Remembering(Plain.Params()))
