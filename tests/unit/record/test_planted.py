"""A run that a stranger plants in a shared store does not pass for a finished one: its ledger and its weights have to say so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
import torch

from lockstep.calls.continuation import finished
from lockstep.driver.finished_run import doubt, find_proven
from lockstep.driver.options import RunOptions
from lockstep.driver.progress import Silent
from lockstep.errors import RecordError
from lockstep.job.identity import identity_digest
from lockstep.record.events.union import Finished, Started
from lockstep.record.ledger.rows import Digests
from lockstep.record.ledger.tables import Rows
from lockstep.record.mirror.stores import find_run
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from lockstep.training.integrity.digests import Digester, model_digest
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.weights import save_weights
from tests.unit.record.conftest import THIRD_PARTY
from tests.unit.record.rows import evaluation_row, step_row

pytestmark = [pytest.mark.filterwarnings(text) for text in THIRD_PARTY]

STEPS = 5
WEIGHTS = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}
Specs = Callable[..., Spec]


def fields(uri: str) -> dict[str, Any]:
    """Each store has an identity of its own, as the tests share a database."""
    return {
        "optimizer.lr": 0.1,
        "batch": [4, 2],
        "store": uri,
        "clip_norm": None,
        "data.train_samples": 640,
    }


def recorded(
    spec: Spec,
    *,
    steps: int = STEPS,
    state: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
) -> str:
    """A run as training leaves it; or with fewer steps, or other weights than those of its ledger."""
    identity = identity_digest(fields(spec.record.uri or ""))
    recorder = Recorder(spec)
    recorder.start()
    files = save_weights(recorder.run_folder(), {"final": state or WEIGHTS})
    digest = model_digest(Digester(torch.device("cpu")), WEIGHTS)
    rows = Rows([step_row(step) for step in range(1, steps + 1)], [evaluation_row(steps)])
    gradients = tuple(range(spec.batch.micro_batches))
    rows.steps[-1] = rows.steps[-1]._replace(digests=Digests(digest, 7, gradients))
    facts = {
        "identity": identity,
        "fields": fields(spec.record.uri or ""),
        "plan": {"total_steps": STEPS},
        "environment": environment or {},
    }
    summary = {"step": steps, "identity": identity, "weights_digest": weights_digest(state or WEIGHTS), "stopped": False}  # fmt: skip
    last = rows.steps[-1]
    parts = {f"train/{name}": value for name, value in last.parts.items()}
    summary["metrics"] = {"train/loss": last.loss, **parts, **rows.evaluations[-1].metrics}
    recorder.tell(Started(facts), *rows.steps, *rows.evaluations, Finished(summary, files))
    recorder.close()
    return recorder.run_id()


def proven(spec: Spec, steps: int = STEPS) -> str | None:
    uri = spec.record.uri or ""
    found = find_proven(uri, identity_digest(fields(uri)), spec.folder, {"total_steps": steps}, early_stop=False)  # fmt: skip
    return None if found is None else found.run_id


@pytest.mark.parametrize(
    ("now", "stands"),
    [
        ({"moved": {"file./data/vocabulary.txt": "one"}}, True),
        ({"moved": {}}, True),
        ({"moved": {"file./data/vocabulary.txt": "other"}}, False),
        ({"moved": {"file./elsewhere/vocabulary.txt": "one"}}, True),
        ({"moved": {"file./elsewhere/vocabulary.txt": "other"}}, False),
        ({"moved": {"replaced torch.relu": "patch.py 01"}}, False),
        ({"moved": {}, "unknown": ["starts another program (date, job.py:3)"]}, False),
    ],
)
def test_a_run_that_took_something_else_from_outside_stands_for_no_other(
    spec: Specs, now: dict[str, Any], stands: bool
) -> None:
    wanted = spec()
    genuine = recorded(wanted, environment={"moved": {"file./data/vocabulary.txt": "one"}})
    uri = wanted.record.uri or ""
    found = find_proven(
        uri,
        identity_digest(fields(uri)),
        wanted.folder,
        {"total_steps": STEPS},
        early_stop=False,
        environment=now,
    )
    assert (None if found is None else found.run_id) == (genuine if stands else None)


def plant(spec: Spec, genuine: str) -> str:
    """What anyone can do who may write to the store: tags, a status, and the documents of another run."""
    from mlflow import MlflowClient

    client = MlflowClient(spec.record.uri)
    run = client.get_run(genuine)
    planted: str = client.create_run(run.info.experiment_id, tags=dict(run.data.tags)).info.run_id
    for name in ("spec.yaml", "summary.json", "fields.json"):
        client.log_artifact(planted, str(spec.folder / genuine / name))
    client.set_terminated(planted, "FINISHED")
    return planted


def test_tags_and_documents_do_not_make_a_finished_run(spec: Specs, database: str) -> None:
    """In MLflow's own store, whether or not the genuine run is there too, and by its id."""
    wanted = spec(database)
    genuine = recorded(wanted)
    planted = plant(wanted, genuine)
    assert proven(wanted) == genuine
    found = find_run(database, planted, wanted.folder)
    assert found.status == "FINISHED"
    with pytest.raises(RecordError, match=f"run {planted} is marked as finished, but"):
        finished(found, wanted, None, RunOptions(progress=Silent()))
    shutil.rmtree(wanted.folder / genuine)  # its store has all of it
    assert proven(wanted) == genuine
    from mlflow import MlflowClient

    MlflowClient(database).delete_run(genuine)
    assert proven(wanted) is None


def test_a_record_that_contradicts_itself_proves_nothing(spec: Specs) -> None:
    wanted = spec()
    other = {**WEIGHTS, "bias": torch.zeros(2)}
    for run_id in (recorded(wanted, state=other), recorded(wanted, steps=STEPS - 1)):
        assert doubt(find_run("off", run_id, wanted.folder), "off", wanted.folder, STEPS)
    assert proven(wanted) is None
    genuine = recorded(wanted)
    assert proven(wanted) == genuine and proven(wanted, steps=STEPS + 1) is None
    run = wanted.folder / genuine
    for name, changed in {"fields.json": "0.1", "summary.json": '"step": 5'}.items():
        text = (run / name).read_text()
        (run / name).write_text(text.replace(changed, changed.replace("1", "2").replace("5", "4")))
        assert proven(wanted) is None, name
        (run / name).write_text("[]")
        assert proven(wanted) is None, name
        (run / name).write_text(text)
    weights = run / "weights" / "final.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert proven(wanted) is None
    weights.write_bytes(content)
    assert proven(wanted) == genuine


def test_a_run_without_its_last_evaluation_or_digests_proves_nothing(spec: Specs) -> None:
    wanted = spec(length={"steps": STEPS})
    genuine = recorded(wanted)
    run = wanted.folder / genuine
    assert proven(wanted) == genuine
    for name, change, reason in (
        ("ledger.parquet", without_digests, "the ledger's last row is one with digests and was found as one without"),
        ("evaluations.parquet", lambda table: table.slice(0, 0), "the last evaluation is after step 5 and was found as none"),
        ("evaluations.parquet", doubled, "eval/loss of the summary is "),
    ):  # fmt: skip
        table = pq.read_table(run / name)
        pq.write_table(change(table), run / name)
        assert proven(wanted) is None, name
        assert doubt(find_run("off", genuine, wanted.folder), "off", wanted.folder).startswith(reason)
        pq.write_table(table, run / name)
    assert proven(wanted) == genuine


def without_digests(table: pa.Table) -> pa.Table:
    return table.drop_columns([name for name in table.column_names if name.endswith(("digest", "digests"))])


def doubled(table: pa.Table) -> pa.Table:
    at = table.column_names.index("eval/loss")
    return table.set_column(at, "eval/loss", pa.compute.multiply(table["eval/loss"], 2.0))


def test_a_folder_that_cannot_be_read_is_passed_over(spec: Specs, tmp_path: Path) -> None:
    wanted = spec()
    genuine = recorded(wanted)
    for name, content in {"torn": "{", "bare": json.dumps({"status": "FINISHED", "tags": {}})}.items():
        (wanted.folder / name).mkdir()
        (wanted.folder / name / "run.json").write_text(content)
    assert proven(wanted) == genuine
