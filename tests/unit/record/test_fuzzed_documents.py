"""Changed documents of every format that is read: nothing is written outside, one line is said, nothing hangs or fills the memory.

Each document is a sound one, changed in its structure or in its bytes. A format whose documents contain their own hash is given
the right hash again, as one who has the source would give it. The quick profile is a sample; `exact` reads 200,000 documents.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.runs.lease import _holder
from lockstep.checkpoint.runs.names import run_of_name
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.tensor_file import read_tensors, tensor_pieces
from lockstep.checkpoint.tree_decoder import unpack
from lockstep.errors import LockstepError
from lockstep.parsing import strict_json, with_hash
from lockstep.proof import signatures, statement
from lockstep.record.events.metrics import points_of
from lockstep.record.ledger import segments, tables
from lockstep.record.ledger.journal import Journal, newest_checkpoint, newest_step
from lockstep.record.ledger.journal_end import end_of, status_of
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.ledger.rows import VERSION, EvaluationRow
from lockstep.record.ledger.tables import Rows
from lockstep.record.mirror.checkpoint_copies import named_by
from lockstep.record.mirror.folder import FolderReader, recorded_in_folder
from lockstep.record.mirror.projection import Projection
from lockstep.record.mirror.stores import find_sweep
from lockstep.record.mirror.sync import sync
from lockstep.spec.loading import load_spec
from tests.unit.record.conftest import THIRD_PARTY
from tests.unit.record.rows import step_row

pytestmark = [pytest.mark.filterwarnings(text) for text in THIRD_PARTY]

RUN = "a" * 32
HANG_S = 20
MOST_BYTES = 768 << 20
"""How much the process may grow by: the largest documents here have some kilobytes, and torch and Arrow are imported in it."""
FACTS = {
    "identity_fields": {"a": 1},
    "environment": {},
    "counters": {"step": 1},
    "metrics": {"eval/loss": 0.5},
}
FILE = {
    "name": "model.a0001.r0000.safetensors",
    "section": "model",
    "kind": "tensors",
    "size": 8,
    "sha256": "0" * 64,
}
MANIFEST = {
    "format": "lockstep-checkpoint", "version": 2, "run": RUN, "step": 1, "attempt": 1, "written_at": 1.0, "identity": "i", **FACTS,
    "files": [FILE], "shared": [f"000000001-000000300.{'a' * 32}.{'b' * 16}.rows 9 {'0' * 64}"],
}  # fmt: skip
RUN_JSON = {
    "run_id": RUN, "name": "n", "status": "RUNNING", "started": 1.0, "ended": None, "params": {"a": "1"},
    "tags": {"lockstep.heartbeat": "1", "lockstep.process": "p 1 2", "lockstep.host": "h", "lockstep.beat": "3"},
}  # fmt: skip
EVENTS: list[Any] = [
    {"opened": {"version": VERSION, "at": 1.0, "host": "h"}},
    {"started": {"workers": 1, "fields": {"a": 1}, "plan": {"steps": 1}, "source": {"a/b.py": "x"}, "git": {"commit": "c"}}},
    {"step": [1, 0, 64, 0.5, 64.0, {"a": 0.25}, 0.001, 1.0, 1.0, 1.0, False, 0.0, 0.1, 2.0, 1, [1, 2, [3], 4]]},
    {"evaluation": [1, 0, {"eval/loss": 0.5}, 0.1, 2.0]},
    {"observation": [1, {"layers/a": 0.5}, 2.0]},
    {"checkpoint": {"step": 1, "uri": "/nowhere/step-000000001", "error": None, "nbytes": 1, "waited_s": 0.0, "copied_s": 0.0,
                    "written_s": 0.0, "wall_clock": 2.0, "deleted": [], "essential": [[1, "/nowhere/step-000000001"]]}},
    {"system": {"node": "n", "at": 1.0, "values": {"system/cpu": 0.5}}},
    {"attempts": [{"attempt": 1, "stragglers": []}]},
    {"peak_memory": [1, 2]},
    {"document": {"name": "notes/a.txt", "text": "x"}},
    {"diagnosed": {"rule": "r", "step": 1, "evidence": "e", "remedy": "m"}},
    {"corrupted": {"step": 1, "since": 0, "attempt": 1, "quantity": "weights", "tensor": "t", "workers": [[0, "h", 1, "cpu", "", [1]]],
                   "wrong": [0], "how": "majority", "micro_batch": None}},
    {"violated": {"text": "t"}},
    {"mended": {"starts": [3], "how": "h"}},
    {"finished": {"summary": {"run_id": RUN, "status": "FINISHED", "step": 1, "metrics": {"eval/loss": 0.5}}, "files": ["weights/final.safetensors"], "at": 3.0}},
]  # fmt: skip
SPEC = {
    "name": "x", "job": {"use": "tiny:Tiny", "params": {"a": [1, {"b": 2.5}]}}, "length": {"steps": 3}, "batch": {"global": 4, "micro": 2},
    "optimizer": {"lr": 0.1}, "record": {"uri": "off", "folder": "runs"}, "checkpoint": {"every": {"steps": 5}},
}  # fmt: skip
STATEMENT = {
    "_type": statement.STATEMENT, "predicateType": statement.PREDICATE, "subject": [], "predicate": {"run": RUN, "ledger": {}},
}  # fmt: skip
ENVELOPE = {
    "payload": "e30=",
    "payloadType": signatures.PAYLOAD_TYPE,
    "signatures": [{"keyid": "k", "sig": "c2ln"}],
}
HOLDER = {
    "number": 1,
    "token": "t",
    "host": "h",
    "place": "p",
    "pid": 1,
    "started": "s",
    "attempt": 1,
    "step": 1,
    "beats": 1,
}
SKELETON = {"a": [1, {"$tuple": [2.5, None]}, {"$map": [[3, "x"]]}], "b": {"$float": "7ff8000000000001"}, "c": {"$int": "0x10"},
            "d": {"$tensor": "w", "order": [1, 0]}, "e": {"$view": "v", "dtype": "F32", "at": 0, "shape": [2], "strides": [1]}}  # fmt: skip


def lines(events: Any) -> bytes:
    """A journal of these events; every line has the right checksum."""
    texts = [
        json.dumps(event).encode("utf-8", "surrogatepass")
        for event in (events if isinstance(events, list) else [events])
    ]
    return b"".join(b"%s %08x\n" % (text, zlib.crc32(text)) for text in texts)


def plain_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def hashed(document: Any) -> bytes:
    try:
        return with_hash(document)
    except (ValueError, TypeError):  # NaN, or no mapping
        return plain_json(document)


def as_yaml(document: Any) -> bytes:
    return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")


def file_of(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# --- what reads each format ------------------------------------------------------------------------------------------


def read_spec(folder: Path, content: bytes) -> None:
    load_spec(file_of(folder, "train.yaml", content))


def read_record(folder: Path, content: bytes) -> None:
    file_of(folder, f"{RUN}/run.json", plain_json(RUN_JSON))
    file_of(folder, f"{RUN}/spec.yaml", content)
    recorded_in_folder(folder, RUN)


def read_summary(folder: Path, content: bytes) -> None:
    file_of(folder, f"{RUN}/run.json", plain_json(RUN_JSON))
    file_of(folder, f"{RUN}/spec.yaml", as_yaml(SPEC))
    file_of(folder, f"{RUN}/summary.json", content)
    recorded_in_folder(folder, RUN)


def read_run(folder: Path, content: bytes) -> None:
    file_of(folder, f"{RUN}/run.json", content)
    reader = FolderReader(folder)
    found = reader.runs(None, 20)
    assert len(found) + len(reader.passed_over) == 1
    from lockstep.cli.records import _page, _table

    _table(found)
    _page(reader.run(RUN), [], {})


def read_journal(folder: Path, content: bytes) -> None:
    run = file_of(folder, f"{RUN}/{NAME}", content).parent
    newest_step(run)
    newest_checkpoint(run)
    journal = Journal(run, read_only=True)
    try:
        status_of(journal.events)
        end_of(journal.events)
        projection = Projection(load_spec(SPEC), run, journal)
        projection.fold(journal.events)
        projection.tags(trouble="", figures=(), ended=True)
        assert projection.end is None or projection.end.documents or not projection.end.status
        journal.missing_steps()
        rows = list(journal.steps())
        for row in (*rows, *journal.evaluations(), *journal.observations()):
            list(points_of(row, None, scaled=False, started_at=1.0))
        tables.encode_steps(rows)
        tables.encode_evaluations(journal.evaluations())
    finally:
        journal.close()


def read_synced(folder: Path, content: bytes) -> None:
    run = file_of(folder, f"{RUN}/{NAME}", content).parent
    file_of(folder, f"{RUN}/run.json", plain_json(RUN_JSON))
    file_of(folder, f"{RUN}/spec.yaml", as_yaml({**SPEC, "record": {"uri": "off", "folder": str(folder)}}))
    sync(run)


def read_manifest(folder: Path, content: bytes) -> None:
    for read in (Manifest.decode, said(named_by)):
        try:
            read(content)
        except LockstepError as error:
            assert_line(error)


def said(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """A reader whose ValueError is its one line, which its callers tell."""

    def reading(content: bytes) -> object:
        try:
            return read(content)
        except ValueError as error:
            raise LockstepError(str(error)) from error

    return reading


def read_skeleton(folder: Path, content: bytes) -> None:
    import torch

    tensors = {"w": torch.zeros(2, 3), "v": torch.zeros(4)}
    said(lambda text: unpack(strict_json(text), tensors))(content)


def read_tensor_file(folder: Path, content: bytes) -> None:
    left = memoryview(content)

    def fill(buffer: memoryview) -> None:
        nonlocal left
        if len(left) < len(buffer):
            raise LockstepError("too short")
        buffer[:] = left[: len(buffer)]
        left = left[len(buffer) :]

    read_tensors(fill, len(content))


def read_statement(folder: Path, content: bytes) -> None:
    statement.parsed(content)


def read_envelope(folder: Path, content: bytes) -> None:
    from lockstep.calls.attestation import _opened

    statement.parsed(_opened(file_of(folder, "a.intoto.json", content), None)[0])


def read_segment(folder: Path, content: bytes) -> None:
    for read in (segments.steps_in, segments.evaluations_in):
        try:
            read(content)
        except LockstepError as error:
            assert_line(error)


def read_ledger(folder: Path, content: bytes) -> None:
    path = file_of(folder, "ledger.parquet", content)
    for read in (tables.read_parquet, tables.read_evaluations, tables.read_observations):
        try:
            read(path)
        except LockstepError as error:
            assert_line(error)


def read_fields(folder: Path, content: bytes) -> None:
    from lockstep.proof.recorded_run import recorded_fields

    file_of(folder, f"{RUN}/spec.yaml", as_yaml(SPEC))
    recorded_fields("off", RUN, file_of(folder, f"{RUN}/fields.json", content).parent)


def read_attempt(folder: Path, content: bytes) -> None:
    file_of(folder, f"{RUN}/owner.json", plain_json({"run": RUN, "token": "t"}))
    file_of(folder, f"{RUN}/attempt.json", content)
    run = RunFolder.open(LocalStorage(folder), RUN)
    attempt = run.attempt(run.fence().number)
    attempt.publish(("step-000000001", "manifest.json"), b"x")


def read_owner(folder: Path, content: bytes) -> None:
    file_of(folder, f"{RUN}/owner.json", content)
    RunFolder.open(LocalStorage(folder), RUN)


def read_holder(folder: Path, content: bytes) -> None:
    holder = _holder(content)
    if holder is not None:
        assert isinstance(holder.shown, str) and holder.gone in (True, False)


def read_name(folder: Path, content: bytes) -> None:
    file_of(folder, "named-n/run_id", content)
    run_of_name(LocalStorage(folder), "n")


def read_sweep(folder: Path, content: bytes) -> None:
    file_of(folder, f"{RUN}/sweep.yaml", content)
    find_sweep("off", RUN, folder)


def read_attempts(folder: Path, content: bytes) -> None:
    from lockstep.record.mirror.documents import attempts_in

    attempts_in(content)


def tensors() -> bytes:
    import torch

    return b"".join(
        map(bytes, tensor_pieces({"w": torch.zeros(2, 3), "v": torch.ones(4, dtype=torch.int64)}))
    )


ROWS = [step_row(number) for number in (1, 2, 3)]
FORMATS: dict[str, tuple[Any, Callable[[Any], bytes] | None, Callable[[Path, bytes], None], int]] = {
    "spec.yaml": (SPEC, as_yaml, read_spec, 8),
    "spec.yaml of a record": (SPEC, as_yaml, read_record, 6),
    "sweep.yaml": ({"spec": SPEC, "search": {"lr": [1, 2]}}, as_yaml, read_sweep, 4),
    "run.json": (RUN_JSON, plain_json, read_run, 12),
    "summary.json": ({"step": 1, "metrics": {"a": 0.5}}, plain_json, read_summary, 4),
    "fields.json": ({"a": 1, "b": {"c": [1]}}, plain_json, read_fields, 4),
    "attempts.json": ([{"attempt": 1, "stragglers": ["a"]}], plain_json, read_attempts, 2),
    "journal": (EVENTS, lines, read_journal, 20),
    "journal, sent": (EVENTS, lines, read_synced, 1),
    "manifest": (MANIFEST, hashed, read_manifest, 14),
    "skeleton": (SKELETON, plain_json, read_skeleton, 8),
    "tensors": (None, None, read_tensor_file, 8),
    "statement": (STATEMENT, plain_json, read_statement, 4),
    "envelope": (ENVELOPE, plain_json, read_envelope, 4),
    "segment": (None, None, read_segment, 5),
    "ledger": (None, None, read_ledger, 5),
    "attempt.json": ({"number": 1, "token": "abc"}, plain_json, read_attempt, 2),
    "owner.json": ({"run": RUN, "token": "t"}, plain_json, read_owner, 2),
    "hold": (HOLDER, plain_json, read_holder, 4),
    "name": (None, None, read_name, 2),
}
"""Of each format a sound document, how it is written, what reads it, and its share of the documents. None: it is changed in its bytes."""

# --- how documents are changed ---------------------------------------------------------------------------------------


def hostile(canary: str) -> st.SearchStrategy[Any]:
    """A value that somebody might plant: paths, odd numbers, other types, nesting."""
    texts = [
        f"{canary}/written", "../../canary/written", "../../../canary/written", "a/../../../../canary/written", "/etc/hostname", "..", ".", "", "a\0b",
        "link/written", "link/secret", "x" * 5000, "\x1b]52;c;AAAA\x07", "\ud800", "nan:zz", "{", "\u202e", "step-000000001", "~", "$tensor", "\u00b2",
    ]  # fmt: skip
    numbers = [
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        -(2**63) - 1,
        10**30,
        10**400,
        1e300,
        -1e308,
        float("nan"),
        float("inf"),
        0.5,
        True,
        False,
        None,
    ]
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    leaf = (
        st.sampled_from([*texts, *numbers, deep, [], {}, [[]], {"": 0}]) | st.text(max_size=8) | st.integers()
    )
    return (
        leaf
        | st.lists(leaf, max_size=3)
        | st.dictionaries(st.sampled_from(texts[:12]) | st.text(max_size=4), leaf, max_size=3)
    )


def changed(document: Any, choose: Callable[[int], int], value: Any) -> Any:
    """A copy of a document with a value, a key or an item changed somewhere in it."""
    if isinstance(document, dict) and document:
        name = list(document)[choose(len(document))]
        match choose(8):
            case 0:
                return {other: one for other, one in document.items() if other != name}
            case 1:
                return {**document, value if isinstance(value, str) else "new": document[name]}
            case 2:
                return {**document, name: value}
        return {**document, name: changed(document[name], choose, value)}
    if isinstance(document, list) and document:
        i = choose(len(document))
        match choose(8):
            case 0:
                return document[:i] + document[i + 1 :]
            case 1:
                return [*document, value]
        return [*document[:i], changed(document[i], choose, value), *document[i + 1 :]]
    return value


def cut(content: bytes, choose: Callable[[int], int]) -> bytes:
    """Bytes that are flipped, dropped, doubled or cut off."""
    for _ in range(1 + choose(3)):
        at, length = choose(len(content) + 1), 1 + choose(8)
        match choose(5):
            case 0:
                content = content[:at]
            case 1:
                content = content[:at] + content[at + length :]
            case 2:
                content = content[:at] + content[at : at + length] * 3 + content[at + length :]
            case 3:
                content = content[:at] + bytes([choose(256)]) + content[at + 1 :]
            case _:
                content = content[:at] + b'[{"&a*: ]}\0\xff\n-9'[choose(16) :][:length] + content[at:]
    return content


def binary(name: str) -> bytes:
    match name:
        case "tensors":
            return tensors()
        case "segment":
            return segments.seal(Rows(ROWS, [EvaluationRow(2, 0, {"eval/loss": 0.5}, 0.1, 2.0)]))[1]
        case "ledger":
            return tables.encode_steps(ROWS)
    return RUN.encode()


def assert_line(error: LockstepError) -> None:
    assert "\n" not in str(error) and len(str(error)) < 8000, str(error)


@contextmanager
def within_time() -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise TimeoutError(f"it has read one document for {HANG_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_changed(tmp_path: Path, name: str, count: int) -> None:
    document, write, read, _ = FORMATS[name]
    canary, folder = tmp_path / "canary", tmp_path / "storage" / "runs"
    canary.mkdir()
    (canary / "secret").write_text("the secret")
    folder.mkdir(parents=True)
    sound = binary(name) if write is None else write(document)
    attempts = [0]

    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False,
        derandomize=count < 1000,
    )  # fmt: skip
    @given(st.randoms(use_true_random=False), hostile(str(canary)), st.integers(0, 3))
    def run(random: Any, value: Any, depth: int) -> None:
        attempts[0] += 1
        choose = random.randrange
        content = sound
        if write is not None and depth:
            made = document
            for _ in range(depth):
                made = changed(made, choose, value)
            content = write(made)
        if write is None or not depth:
            content = cut(content, choose)
        with within_time():
            try:
                read(folder, content)
            except LockstepError as error:
                assert_line(error)
        assert [*map(os.fspath, canary.iterdir())] == [str(canary / "secret")]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    assert attempts[0] >= count
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
    assert (canary / "secret").read_text() == "the secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["canary", "storage"]
    assert [path.name for path in (tmp_path / "storage").iterdir()] == ["runs"]
    digest = hashlib.sha256(b"the secret").hexdigest()
    assert not [
        path
        for path in folder.rglob("*")
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_document_is_read_or_refused_in_a_line(tmp_path: Path, name: str) -> None:
    read_changed(tmp_path, name, 2 if name == "journal, sent" else 25)


@pytest.mark.exact
@pytest.mark.parametrize("name", FORMATS)
def test_of_200_000_changed_documents_none_does_harm(tmp_path: Path, name: str) -> None:
    shares = sum(share for *_, share in FORMATS.values())
    count = -(-200_000 * FORMATS[name][-1] // shares)
    read_changed(tmp_path, name, count)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("attempt.json", "journal, sent")])
def test_a_sound_document_is_read(tmp_path: Path, name: str) -> None:
    """The control."""
    document, write, read, _ = FORMATS[name]
    try:
        read(tmp_path, binary(name) if write is None else write(document))
    except LockstepError as error:
        assert name in {"envelope", "skeleton", "spec.yaml"}, (
            error
        )  # each is refused for what it holds, not for its form


def test_a_reader_that_trusts_names_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the canary: a reader that joins a name from the document to its folder."""

    def trusting(folder: Path, content: bytes) -> None:
        try:
            document = json.loads(content)
            (folder / document["name"]).write_text("x")
        except (ValueError, TypeError, KeyError, OSError, RecursionError, UnicodeEncodeError) as error:
            raise LockstepError("refused") from error

    monkeypatch.setitem(FORMATS, "trusting", ({"name": "a"}, plain_json, trusting, 1))
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        read_changed(tmp_path, "trusting", 999)
