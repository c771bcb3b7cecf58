"""Each format that Lockstep writes has one version; another one is refused in one line, with what it has and what was wanted."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from lockstep.checkpoint.errors import OtherFormatError
from lockstep.checkpoint.manifest import Facts, Manifest
from lockstep.errors import LockstepError, RecordError, SpecError, StorageError
from lockstep.parsing import with_hash
from lockstep.proof import statement
from lockstep.proof.summary_checks import read_weights
from lockstep.record.events.union import Opened
from lockstep.record.ledger import segments, tables
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.live_rows import RowsSoFar
from lockstep.record.ledger.rows import VERSION
from lockstep.record.ledger.tables import Rows
from lockstep.training.auxiliary_state import beside_path, load_beside, save_beside
from lockstep.training.stored_weights import load_weights
from lockstep.training.weights import save_weights
from tests.unit.record.rows import evaluation_row, step_row


def of_journal(folder: Path, version: int | None) -> None:
    journal = Journal(folder)
    journal.add([Opened(1.0, {"lockstep.process": "p"}), step_row(1)])
    journal.close()
    _, steps = (folder / NAME).read_bytes().split(b"\n", 1)
    document = {"opened": {"version": version, "at": 1.0, "lockstep.process": "p"}}
    if version is None:
        del document["opened"]["version"]
    text = json.dumps(document, separators=(",", ":")).encode()
    (folder / NAME).write_bytes(b"%s %08x\n%s" % (text, zlib.crc32(text), steps))


def journal(folder: Path, version: int | None) -> None:
    of_journal(folder, version)
    Journal(folder, read_only=True).close()


def journal_beside_its_writer(folder: Path, version: int | None) -> None:
    of_journal(folder, version)
    RowsSoFar(folder)


def manifest(folder: Path, version: int | None) -> None:
    document = json.loads(Manifest("run-a", 7, 3, 1.5, (), Facts()).encode())
    del document["sha256"]
    Manifest.decode(with_hash({**document, "version": version}))


def parquet(path: Path, version: int | None) -> Path:
    table = pq.read_table(path)
    assert table.schema.metadata == {b"lockstep-ledger": b"%d" % VERSION}
    metadata = None if version is None else {"lockstep-ledger": str(version)}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def of_steps(folder: Path, version: int | None) -> None:
    tables.write_parquet([step_row(1)], folder / "x")
    tables.read_parquet(parquet(folder / "x", version))


def of_evaluations(folder: Path, version: int | None) -> None:
    tables.write_evaluations([evaluation_row(1)], folder / "x")
    tables.read_evaluations(parquet(folder / "x", version))


def segment(folder: Path, version: int | None) -> None:
    _, content = segments.seal(Rows([step_row(1)], ()))
    assert content.startswith(b"lockstep-ledger-1 ")
    segments.steps_in(content.replace(b"lockstep-ledger-1", b"lockstep-ledger-%d" % (version or 0), 1))


def weights(folder: Path, version: int | None) -> Path:
    (path,) = save_weights(folder, {"final": {"weight": torch.ones(1, 1)}})
    if version != 1:
        safetensors.torch.save_file({"weight": torch.ones(1, 1)}, path, {"lockstep-weights": str(version)})
    return path


def final_weights(folder: Path, version: int | None) -> None:
    assert read_weights(weights(folder, version))


def initial_weights(folder: Path, version: int | None) -> None:
    load_weights(torch.nn.Linear(1, 1, bias=False), str(weights(folder, version)))


def beside(folder: Path, version: int | None) -> None:
    path = folder / "final.safetensors"
    save_beside(path, {"job": {"x": torch.ones(1)}})
    with safetensors.safe_open(beside_path(path), "pt") as file:
        content = json.loads(file.metadata()["lockstep-beside"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    content["version"] = version
    safetensors.torch.save_file(tensors, beside_path(path), {"lockstep-beside": json.dumps(content)})
    load_beside(path)


Read = Callable[[Path, int | None], None]
FORMATS: dict[Read, tuple[int, type[LockstepError]]] = {
    journal: (VERSION, RecordError),
    journal_beside_its_writer: (VERSION, RecordError),
    manifest: (2, OtherFormatError),
    of_steps: (VERSION, StorageError),
    of_evaluations: (VERSION, StorageError),
    segment: (1, StorageError),
    final_weights: (1, StorageError),
    initial_weights: (1, SpecError),
    beside: (1, StorageError),
}


@pytest.mark.parametrize("read", FORMATS)
def test_another_version_is_refused_in_one_line(tmp_path: Path, read: Read) -> None:
    wanted, kind = FORMATS[read]
    read(tmp_path, wanted)
    for got in (wanted - 1, wanted + 1, None):
        shown = r"(0|None)" if not got else str(got)
        line = (
            rf"it has format version {shown}, wanted {wanted}: it was made by another Lockstep; use that one"
        )
        with pytest.raises(kind) as caught:
            read(tmp_path / str(got), got)
        assert re.search(line, str(caught.value)) and "\n" not in str(caught.value)


def test_weights_that_no_lockstep_wrote_have_no_version(tmp_path: Path) -> None:
    """The control: a run may begin with them."""
    safetensors.torch.save_file({"weight": torch.ones(1, 1)}, tmp_path / "x.safetensors")
    model = torch.nn.Linear(1, 1, bias=False)
    load_weights(model, str(tmp_path / "x.safetensors"))
    assert model.weight.item() == 1.0


def test_a_statement_of_another_version_is_refused_in_one_line() -> None:
    text = {"_type": statement.STATEMENT, "predicateType": statement.PREDICATE, "predicate": {"run": "a"}}
    assert statement.parsed(json.dumps(text).encode())
    text["predicateType"] = statement.PREDICATE.replace(f"v{VERSION}", f"v{VERSION + 1}")
    with pytest.raises(
        SpecError,
        match=rf"^statement: got one of .*run:v{VERSION + 1}.*, wanted urn:lockstep-train:run:v{VERSION} in",
    ):
        statement.parsed(json.dumps(text).encode())
