"""G1 for Hugging Face models: one value of every bit and metric on any number of workers, with loader processes, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.job.loading import load_job
from lockstep.record.ledger.tables import DETERMINISTIC, read_evaluations, read_parquet
from tests.distributed.pool import Pool
from tests.distributed.training import Document, bits, train, train_left_fold, train_rank_seeds
from tests.forked import Forked, lockstep
from tests.unit.hf.made import LLAMA, classifier, language_model, make


def adapters(folder: Path) -> Document:
    """LoRA with dropout of its own, on a model that lies in a folder."""
    path = folder / "model"
    if not path.exists():
        made = language_model(folder, LLAMA)["job"]
        job: Any = load_job(made["use"], made["params"])
        job.save_pretrained(job.model(), path)
    lora = {"r": 2, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}
    return language_model(folder, path=str(path), lora=lora)


DOCUMENTS = {
    "gpt2": language_model,
    "llama": lambda folder: language_model(folder, LLAMA),
    "bert": classifier,
    "adapters": adapters,
    "checkpointed": lambda folder: {**language_model(folder), "activation_checkpointing": True},
}
"""The jobs by name; GPT-2 and BERT have dropout, and the last step of BERT's epoch is ragged."""


pytestmark = pytest.mark.exact  # each process of a group imports transformers for five seconds


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("hf"))


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("job", DOCUMENTS)
def test_sharded_parameters_change_no_bit(pool: Pool, folder: Path, job: str, workers: int) -> None:
    document = DOCUMENTS[job](folder)
    assert pool.run(workers, train, {**document, "sharding": "full"}) == [train(document)] * workers


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("job", DOCUMENTS)
def test_no_number_of_workers_changes_a_bit(
    pool: Pool, folder: Path, job: str, workers: int, processes: int
) -> None:
    document = DOCUMENTS[job](folder)
    whole = train(document)
    data = {**document.get("data", {}), "loader_processes": processes}
    for trained in pool.run(workers, train, {**document, "data": data}):
        assert trained == whole
        assert trained.summary["metrics"] == whole.summary["metrics"]


@pytest.mark.parametrize("broken", [train_left_fold, train_rank_seeds])
def test_another_order_of_addition_and_other_seeds_are_other_bits(
    pool: Pool, folder: Path, broken: Callable[[Document], Any]
) -> None:
    """The negative control: sums from left to right, and dropout by rank."""
    document = language_model(folder)
    assert pool.run(2, broken, document)[0].digests != train(document).digests


@pytest.mark.parametrize("job", ["gpt2", "bert", "adapters"])
def test_a_killed_run_is_taken_up_with_the_same_bits(folder: Path, tmp_path: Path, job: str) -> None:
    """SIGKILL of the process tree in mid-run, and a resume with loader processes."""
    document = {**DOCUMENTS[job](folder), "length": {"steps": 60}, "record": {"uri": "off"}}
    document["checkpoint"] = {"storage": "runs", "every": {"steps": 3}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(document))
    whole = told(tmp_path, start(tmp_path, "train", "train.yaml", "checkpoint.storage=whole"))
    killed = start(tmp_path, "train", "train.yaml")
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("runs/*/step-*/manifest.json")):
        assert time.monotonic() < deadline and killed.poll() is None, "no checkpoint appeared"
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (run,) = [path.parent for path in tmp_path.glob("runs/*/owner.json")]
    resumed = start(tmp_path, "resume", run.name, "data.loader_processes=2")
    assert told(tmp_path, resumed, attempts=2) == whole


def start(folder: Path, command: str, *more: str) -> Forked:
    return lockstep(command, "--local", "--uri", "off", *more, "--json", cwd=folder)


def told(folder: Path, process: Forked, attempts: int = 1) -> Any:
    """What a run came to, as bits."""
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["attempts"] == attempts
    run = Path(folder, result["folder"])
    rows = read_parquet(run / "ledger.parquet")
    return (
        result["weights_digest"],
        bits(result["metrics"]),
        [bits({name: getattr(row, name) for name in DETERMINISTIC}) for row in rows],
        [(row.step, bits(row.metrics)) for row in read_evaluations(run / "evaluations.parquet")],
    )
