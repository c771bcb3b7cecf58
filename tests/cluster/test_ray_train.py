"""Runs on real Ray: the same bits as anywhere else, one record, errors that explain themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep import train
from lockstep.attempts.problems import TOO_SMALL
from lockstep.calls.verify import verify
from lockstep.clusters.ray_internals import PUBLIC_ONLY
from lockstep.driver.result import Result
from lockstep.errors import SpecError
from lockstep.record.ledger.tables import DETERMINISTIC, read_observations, read_parquet, write_parquet
from tests.cluster import shipped
from tests.raised import raises

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


def spec(folder: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "job": {"use": "tests.cluster.broken_jobs:Talking", "params": {"width": 8}},
        "length": {"steps": 14},
        "batch": {"global": 192, "micro": 32},
        "data": {"drop_last": False},
        "clip_norm": 1.0,
        "workers": {"min": 1, "max": 1},
        "checkpoint": {"storage": str(folder / "runs")},
        "record": {"uri": "off", "observe_every": 5},
    }
    return {**base, **changes}


def columns(result: Result) -> list[dict[str, Any]]:
    rows = read_parquet(Path(result.folder, "ledger.parquet"))
    return [{name: repr(getattr(row, name)) for name in DETERMINISTIC} for row in rows]


def layers(result: Result) -> list[dict[str, str]]:
    """The gradient flow of each observation, with every bit."""
    rows = read_observations(Path(result.folder, "observations.parquet"))
    return [
        {name: value.hex() for name, value in row.values.items() if name[:7] == "layers/"} for row in rows
    ]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run in one plain process."""
    return train(spec(tmp_path_factory.mktemp("here")), local=True)


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("most", "loaders", "found", "public"),
    [
        pytest.param(1, 0, 1, False, marks=pytest.mark.exact),
        (2, 2, 2, True),
        pytest.param(3, 0, 3, False, marks=pytest.mark.exact),
        pytest.param(6, 0, 4, False, marks=pytest.mark.exact),
    ],
)
def test_digest_and_ledger_are_those_of_one_process(
    here: Result,
    tmp_path: Path,
    most: int,
    loaders: int,
    found: int,
    public: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G1 over workers, on Ray, with loader processes, by Ray's public TorchTrainer as well. Asked for up to six, a cluster of four gives four.

    And what each worker printed is in the record: both streams of every rank, the last words before the end among them, and
    nothing of Ray's own marks.
    """
    monkeypatch.setenv(PUBLIC_ONLY, str(int(public)))  # test_supervisor.py goes the driver's own way
    data = {"drop_last": False, "loader_processes": loaders}
    there = train(spec(tmp_path, workers={"min": found, "max": most}, data=data))
    assert there.workers == found
    assert any("public TorchTrainer" in text for text in there.warnings) == public
    assert there.weights_digest == here.weights_digest
    assert there.identity == here.identity
    assert there.metrics == here.metrics
    assert columns(there) == columns(here)
    assert layers(there) == layers(here)
    assert len(layers(there)) == 3
    logs = {path.name: path.read_text() for path in Path(there.folder, "logs").iterdir()}
    for rank in range(found):
        out = logs[f"attempt-1-rank-{rank}-stdout.txt"]
        assert out.count("a batch of") >= 14
        assert ":job_id:" not in out
        assert "to standard error é" in logs[f"attempt-1-rank-{rank}-stderr.txt"]
    if most == 3:
        verified_on_ray(there)


SCRIPT = """
import torch
from jobs.digits.job import Digits

class Mine(Digits):
    def loss(self, model, batch):
        return super().loss(model, batch)

class Other(torch.nn.Module): ...
"""


@pytest.mark.exact  # tests/unit/calls/test_notebook.py trains one in a process of its own
def test_a_class_of_a_script_is_imported_by_workers_and_recorder(
    here: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing on any path has its module: its source travels with the run."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    main = ModuleType("__main__")
    main.__file__ = str(script)
    exec(compile(SCRIPT, str(script), "exec"), vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    asked = spec(tmp_path, workers={"min": 2, "max": 2})
    there = train({**asked, "job": {"params": {"width": 8}}}, job=main.Mine)
    assert (there.workers, there.weights_digest, there.metrics) == (2, here.weights_digest, here.metrics)
    recorded = (Path(there.folder) / "source" / "lockstep_main.py").read_text()
    assert "class Mine(Digits):" in recorded
    assert "class Other" not in recorded


def verified_on_ray(run: Result) -> None:
    """Taken again on Ray by another number of workers: nothing is left of that, and a planted value is found."""
    storage = Path(run.folder).parent
    before = sorted(storage.rglob("*"))
    found = verify(run.run_id, uri="off", storage=storage, workers=3, steps=6)
    assert found.same and found.same_bits
    assert sorted(storage.rglob("*")) == before
    rows = read_parquet(Path(run.folder, "ledger.parquet"))
    rows[8] = rows[8]._replace(loss=rows[8].loss * 2)
    write_parquet(rows, Path(run.folder, "ledger.parquet"))
    found = verify(run.run_id, uri="off", storage=storage, steps=6)
    assert found.first_difference is not None
    assert found.first_difference[:3] == (9, None, "loss")


VERIFIED = [
    ("phases", "bf16", 2, 4),
    ("tar shards", "fp32", 4, 2),
    ("digits", "fp16", 4, 1),
    ("stdlib_gpt", "bf16", 2, 3),
    ("images", "fp16", 1, 4),
    ("tabular", "fp32", 3, 2),
    ("hf/gpt", "bf16", 2, 1),
    ("practice/gelu", "fp32", 1, 2),
    ("practice/glu", "bf16", 3, 1),
    ("practice/straight_through", "fp16", 2, 4),
    ("practice/initialisation", "fp32", 4, 2),
    ("practice/precision", "bf16", 1, 3),
    ("hf/lora", "fp32", 3, 4),
    ("hf/bert", "fp16", 4, 3),
]


@pytest.mark.exact  # minutes
@pytest.mark.parametrize(("job", "precision", "by", "again"), VERIFIED)
def test_each_job_here_is_verified_on_ray_and_without(
    tmp_path: Path, job: str, precision: str, by: int, again: int
) -> None:
    """G6: recorded by 1 … 4 workers, taken again by 1 … 4 others and by one process, in three precisions, from the beginning and on."""
    workers = {"min": by, "max": by}
    run = train(shipped.document(job, tmp_path, precision=precision, workers=workers))
    assert run.workers == by
    where: dict[str, Any] = {"uri": "off", "storage": tmp_path / "runs"}
    for options in ({"workers": again}, {"local": True}, {"local": True, "all_steps": True}):
        part = {} if options.get("all_steps") else {"from_step": 4}
        found = verify(run.run_id, **options, **part, **where)
        assert found.same and found.same_bits and found.fields == [], found
        assert found.steps == (6 if options.get("all_steps") else 4)


@pytest.mark.exact  # half a minute
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method:DeprecationWarning"
)  # the compiler's own imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_run_on_ray_is_that_of_one_process(tmp_path: Path) -> None:
    """G1 with `compile: true`: on two workers, which read or write programs of their user's; and taken again by three (G6)."""
    job = {"use": "tests.distributed.small_jobs:Plain", "params": {"samples": 96, "norm": "batch"}}
    base = {
        "job": job,
        "batch": {"global": 24, "micro": 3},
        "length": {"steps": 6},
        "record": {"uri": "off", "digest_every": 1},
        "compile": True,
    }
    here = train(spec(tmp_path / "here", **base), local=True)
    there = train(spec(tmp_path / "there", **base, workers={"min": 2, "max": 2}))
    assert there.workers == 2
    assert (there.weights_digest, there.identity) == (here.weights_digest, here.identity)
    assert columns(there) == columns(here)
    eager = train(spec(tmp_path / "eager", **{**base, "compile": False}), local=True)
    assert eager.identity != here.identity
    storage = Path(there.folder).parent
    found = verify(there.run_id, uri="off", storage=storage, workers=3, all_steps=True)
    assert found.same and found.same_bits and found.steps == 6


def test_more_workers_than_the_cluster_has_are_refused(tmp_path: Path) -> None:
    with raises(TOO_SMALL, got=5, need="1 CPU", have="4 CPU"):
        train(spec(tmp_path, workers={"min": 5, "max": 5}))


@pytest.mark.exact  # tests/unit/cli/test_mistakes.py, without Ray
def test_no_run_exists_while_it_is_rehearsed(tmp_path: Path) -> None:
    """And no step is taken before the driver has told its id."""
    told = tmp_path / "told"
    params = {"runs": str(tmp_path / "runs"), "told": str(told)}
    result = train(
        spec(
            tmp_path,
            job={"use": "tests.cluster.broken_jobs:Witness", "params": params},
            workers={"min": 2, "max": 2},
        ),
        on_run_id=told.write_text,
    )
    assert told.read_text() == result.run_id
    seen = told.with_suffix(".seen").read_text().splitlines()
    assert {line for line in seen if line.endswith(" True")} == {"0 False True", "1 True True"}


@pytest.mark.exact  # tests/unit/cli/test_mistakes.py, without Ray
def test_a_mistake_in_the_spec_that_only_data_show_is_a_spec_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"lower batch\.global or set data\.drop_last=false"):
        train(spec(tmp_path, batch={"global": 4096, "micro": 512}, data={"drop_last": True}))
