"""Records and checkpoints from strangers: no file outside is written or read, and one bad record hides no other."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.manifest import VERSION, Manifest
from lockstep.cli.records import _page, _table
from lockstep.errors import LockstepError
from lockstep.parsing import with_hash
from lockstep.record.ledger import rows
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.mirror.checkpoint_copies import _linked, named_by
from lockstep.record.mirror.folder import FolderReader
from lockstep.record.mirror.sync import sync

RUN = "a" * 32
MINE = "b" * 32
SUMMARY = {"run_id": RUN, "status": "FINISHED", "step": 1, "metrics": {}}
STEP = {"step": [1, 0, 64, 0.5, 64.0, {}, 0.001, 1.0, 1.0, 1.0, False, 0.0, 0.1, 2.0, 1, None]}


def run_folder(storage: Path, events: Sequence[Mapping[str, Any]]) -> Path:
    """The folder of a run with these lines in its journal, each with the right checksum."""
    folder = storage / RUN
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(
        f'name: x\njob: {{use: "tiny:Tiny"}}\nrecord: {{uri: "off", folder: "{storage}"}}\n'
    )
    (folder / "run.json").write_text(json.dumps(run_json(RUN, status="RUNNING", ended=None)))
    with (folder / NAME).open("wb") as journal:
        for event in [{"opened": {"version": rows.VERSION, "at": 1.0, "host": "h"}}, *events]:
            text = json.dumps(event, separators=(",", ":")).encode()
            journal.write(b"%s %08x\n" % (text, zlib.crc32(text)))
    return folder


def run_json(run_id: str, **changed: Any) -> dict[str, Any]:
    return {
        "run_id": run_id, "name": "mine", "status": "FINISHED", "started": 1.0, "ended": 2.0, "params": {}, "tags": {}, **changed,
    }  # fmt: skip


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FINISHED = {"finished": {"summary": SUMMARY, "files": [], "at": 3.0}}


@pytest.mark.parametrize(
    "events",
    [
        [{"document": {"name": "../../canary/written", "text": "x"}}, FINISHED],
        [{"document": {"name": "{canary}/written", "text": "x"}}, FINISHED],
        [{"document": {"name": "a/../../../canary/written", "text": "x"}}, FINISHED],
        [{"started": {"workers": 1, "source": {"../../../canary/written": "x"}}}, FINISHED],
        [{"started": {"workers": 1, "../../canary/written": {"a": 1}}}, FINISHED],
        [{"finished": {"summary": SUMMARY, "files": ["{canary}/secret"], "at": 3.0}}],
        [{"finished": {"summary": SUMMARY, "files": ["../../canary/secret"], "at": 3.0}}],
        [{"document": {"name": "link/written", "text": "x"}}, FINISHED],
        [{"finished": {"summary": SUMMARY, "files": ["link/secret"], "at": 3.0}}],
        [{"finished": {"summary": SUMMARY, "files": ["planted"], "at": 3.0}}],
    ],
)
def test_a_foreign_journal_writes_and_reads_nothing_outside(tmp_path: Path, events: Any) -> None:
    canary, storage = tmp_path / "canary", tmp_path / "runs"
    canary.mkdir()
    (canary / "secret").write_text("the secret")
    events = json.loads(json.dumps(events).replace("{canary}", str(canary)))
    folder = run_folder(storage, [STEP, *events])
    (folder / "link").symlink_to(canary)
    (folder / "planted").symlink_to(canary / "secret")
    try:
        sync(folder)
    except LockstepError as error:
        assert "\n" not in str(error)
    assert everything(canary) == {"secret": b"the secret"}
    (folder / "link").unlink()
    if (folder / "planted").is_symlink():  # else it was replaced by a copy
        (folder / "planted").unlink()
    assert not [name for name, content in everything(storage).items() if content == b"the secret"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["canary", "runs"]


def test_the_same_journal_with_sound_names_is_recorded(tmp_path: Path) -> None:
    """The control."""
    text = {"document": {"name": "evaluations/step-1/a.txt", "text": "x"}}
    started = {"started": {"workers": 1, "source": {"package/job.py": "y"}}}
    folder = run_folder(tmp_path / "runs", [started, STEP, text, FINISHED])
    assert sync(folder).step == 1
    assert (folder / "evaluations/step-1/a.txt").read_text() == "x"
    assert (folder / "source/package/job.py").read_text() == "y"
    assert json.loads((folder / "run.json").read_text())["status"] == "FINISHED"


@pytest.mark.parametrize("name", [NAME, "log.txt"])
def test_a_file_of_the_record_that_is_a_link_is_left_alone(tmp_path: Path, name: str) -> None:
    folder = run_folder(tmp_path / "runs", [STEP, FINISHED])
    (tmp_path / "theirs").write_bytes((folder / NAME).read_bytes() + b"half a line")
    before = (tmp_path / "theirs").read_bytes()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "theirs")
    try:
        sync(folder)
    except LockstepError as error:
        assert "\n" not in str(error)
    assert (tmp_path / "theirs").read_bytes() == before


BAD_RUNS: dict[str, Any] = {
    "started huge": {"started": 1e300}, "started nan": {"started": float("nan")}, "ended huge": {"ended": 1e300},
    "ended nan": {"ended": float("nan")}, "other run": {"run_id": "../../../../etc"}, "long id": {"run_id": "x" * 5000},
    "odd status": {"status": "ODD"}, "running": {"status": "RUNNING"},
    "odd beat": {"status": "RUNNING", "tags": {"lockstep.heartbeat": "abc", "lockstep.process": "x"}},
    "list beat": {"status": "RUNNING", "tags": {"lockstep.heartbeat": [1], "lockstep.process": {}}},
    "odd process": {"status": "RUNNING", "tags": {"lockstep.heartbeat": "1", "lockstep.process": "x \u00b2 1"}},
    "tags of lists": {"tags": {"lockstep.error": [1, 2]}}, "started bool": {"started": True}, "negative": {"started": -1e18},
    "int huge": {"started": 10**400}, "started text": {"started": "1"}, "no params": {"params": []},
}  # fmt: skip
BAD_TEXTS = {
    "deep": b"[" * 200_000, "deep mapping": b'{"a":' * 500 + b"1" + b"}" * 500, "digits": b'{"started":' + b"9" * 5000 + b"}",
    "empty": b"", "no UTF-8": b"\xff\xfe{", "list": b"[]", "number": b"3",
}  # fmt: skip


@pytest.mark.parametrize("name", [*BAD_RUNS, *BAD_TEXTS, "pipe"])
def test_one_bad_run_hides_no_other(tmp_path: Path, name: str) -> None:
    for run_id in (RUN, MINE):
        (tmp_path / run_id).mkdir()
        (tmp_path / run_id / "run.json").write_text(json.dumps(run_json(run_id)))
    bad = tmp_path / RUN / "run.json"
    if name in BAD_RUNS:
        bad.write_text(json.dumps({**run_json(RUN, name="theirs"), **BAD_RUNS[name]}))
    elif name in BAD_TEXTS:
        bad.write_bytes(BAD_TEXTS[name])
    else:
        import os

        bad.unlink()
        os.mkfifo(bad)
    reader = FolderReader(tmp_path)
    runs = reader.runs(None, 20)
    assert "mine" in _table(runs)
    assert len(runs) + len(reader.passed_over) == 2
    assert not any("\n" in line or len(line) > 600 for line in reader.passed_over)
    try:
        _page(reader.run(RUN), [], {})
    except LockstepError as error:
        assert "\n" not in str(error)


def manifest_of(**changed: Any) -> bytes:
    facts = {"identity_fields": {}, "environment": {}, "counters": {}, "metrics": {}}
    document = {
        "format": "lockstep-checkpoint",
        "version": VERSION,
        "run": RUN,
        "step": 1,
        "attempt": 1,
        "written_at": 1.0,
    }
    return with_hash({**document, "files": [], "identity": "", **facts, "shared": [], **changed})


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.rows", "1/../../a.rows", "a.rows", "1.rows\n"])
def test_a_manifest_that_names_a_file_outside_is_refused(name: str) -> None:
    assert Manifest.decode(manifest_of()).shared == ()
    with pytest.raises(BadCheckpointError):
        Manifest.decode(manifest_of(shared=[f"{name} 9 {'0' * 64}"]))
    entry = {"name": name, "section": "a", "kind": "bytes", "size": 1, "sha256": "0" * 64}
    with pytest.raises(BadCheckpointError):
        Manifest.decode(manifest_of(files=[entry]))


def test_a_manifest_with_another_hash_names_nothing() -> None:
    text = manifest_of(shared=[f"1.rows 9 {'0' * 64}"])
    assert named_by(text).shared == ("1.rows",)
    with pytest.raises(ValueError, match="hash"):
        named_by(text.replace(b"1.rows", b"2.rows"))


@pytest.mark.parametrize("name", ["../../secret", "{out}/secret", "link"])
def test_no_file_of_others_is_sent_as_part_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    """A foreign run's manifest, with the right hash, that names a file of the user who sends it."""
    (tmp_path / "secret").write_text("the secret")
    folder = tmp_path / "run" / "step-000000001"
    folder.mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "secret")
    text = with_hash({"files": [{"name": name.replace("{out}", str(tmp_path))}], "shared": []})
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"lead|path|link"), _linked(folder):
        pass


@pytest.mark.parametrize("uri_name", ["../../../canary", "link"])
def test_a_copy_from_a_store_writes_nothing_outside(tmp_path: Path, database: str, uri_name: str) -> None:
    """The copy's manifest was changed to name a file outside, and the store has one of that name."""
    from urllib.parse import unquote

    from lockstep.record.mirror.mlflow import MlflowStore
    from lockstep.record.mirror.stores import find_copies

    canary = tmp_path / "victim" / "authorized_keys"
    canary.parent.mkdir()
    folder = tmp_path / "step-000000001"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(manifest_of())
    store = MlflowStore(database, "copies", "r")
    run_id = store.open(None)
    store.log_checkpoint(1, {}, folder)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=database)
    run = client.get_run(run_id)
    (model,) = client.search_logged_models(
        [run.info.experiment_id], filter_string=f"source_run_id = '{run_id}'"
    )
    place = Path(unquote(model.artifact_location.removeprefix("file://")))
    texts = (
        manifest_of().replace(b'"shared": []', b'"shared": ["%s 9 0"]' % str(canary).encode()),
        manifest_of(shared=[f"{canary} 9 {'0' * 64}"]),
        manifest_of(shared=[f"{uri_name}/x 9 {'0' * 64}"]),
    )
    for number, text in enumerate(texts):
        (place / "manifest.json").unlink()
        (place / "manifest.json").write_bytes(text)
        there = tmp_path / f"there-{number}"
        there.mkdir()
        (copy,) = find_copies(database, run_id)
        copy.download(there)
        assert {path.name for path in there.iterdir()} == {"manifest.json"}
        assert not list(canary.parent.iterdir())
