"""Every field of every document of a finished run is changed in turn: `verify` refuses each, or names it as told and not proven."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.errors import LockstepError
from lockstep.proof.record_checks import TOLD, record_disagreements
from lockstep.proof.recorded_run import recorded_run
from lockstep.proof.replaying import Replayed
from lockstep.proof.step_spans import whole
from lockstep.proof.verification import Verified, verify
from lockstep.record.ledger import final_tables
from lockstep.record.ledger.journal import Journal
from lockstep.record.mirror.seal import SEAL, seal, sealed_files
from lockstep.spec.fields import PLACEMENT, PLACEMENT_FIELDS
from tests.unit.proof.forged_runs import put_state, trained

Path_ = tuple[str | int, ...]
"""Where a value is in a document: names and positions."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("honest"))


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / honest.name))


def other(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case _:
            return "x"


def leaves(document: Any, where: Path_ = ()) -> Iterator[Path_]:
    """The places of all values of a document, with one for a name that it does not have."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield from leaves(value, (*where, name))
        yield (*where, "added")
    elif isinstance(document, list) and document:
        for i, value in enumerate(document):
            yield from leaves(value, (*where, i))
    else:
        yield where


def changed(document: Any, where: Path_) -> Any:
    """The document with another value there."""
    if not where:
        return other(document)
    name, *rest = where
    if isinstance(document, dict):
        value = document.get(name) if not rest or name in document else None
        return {**document, name: changed(value, tuple(rest))}
    return [changed(value, tuple(rest)) if i == name else value for i, value in enumerate(document)]


def disagrees(run: Path, aside: Path) -> bool:
    """Whether the record of a run is refused without training anything."""
    try:
        recorded = recorded_run(run.name, "off", run.parent)
        return not recorded.ended or next(record_disagreements(recorded, aside), None) is not None
    except LockstepError:
        return True


# --- changed alone ----------------------------------------------------------------------------------------------


def changes_alone(run: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each thing that can be changed in a run's folder, and how."""
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if not path.is_file() or (name not in sealed_files(run) and name not in ("run.json", SEAL)):
            continue
        content = path.read_bytes()
        if path.suffix == ".json":
            document = json.loads(content)
            for where in leaves(document):
                text = json.dumps(changed(document, where), indent=2).encode()
                yield f"{name}: {'.'.join(map(str, where))}", lambda p=path, t=text: p.write_bytes(t)
        elif path.suffix == ".parquet":
            table = pq.read_table(path)
            for column in table.column_names:
                yield (
                    f"{name}: {column}",
                    lambda p=path, t=table, c=column: pq.write_table(t.drop_columns([c]), p),
                )
            more = table.append_column("added", pa.array([1.0] * len(table)))
            yield f"{name}: added", lambda p=path, t=more: pq.write_table(t, p)
        elif path.suffix == ".jsonl":
            lines = content.splitlines()[:-1]  # what it says of the store comes after the seal
            for i in range(len(lines)):
                forged = content.replace(lines[i], lines[i][:5] + bytes([lines[i][5] ^ 1]) + lines[i][6:])
                yield f"{name}: line {i}", lambda p=path, t=forged: p.write_bytes(t)
            yield f"{name}: added", lambda p=path, t=content + lines[3] + b"\n": p.write_bytes(t)
        else:
            for i in (0, len(content) // 2):
                flipped = content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :]
                yield f"{name}: byte {i}", lambda p=path, t=flipped: p.write_bytes(t)
        yield f"{name}: gone", lambda p=path: p.unlink()
    yield "added.json: all of it", lambda: (run / "added.json").write_text("{}") and None
    (run / "logs").mkdir(exist_ok=True)
    yield "logs/added.txt: all of it", lambda: (run / "logs" / "added.txt").write_text("more") and None


PARAMS_OF_PLACEMENT = tuple(
    f"run.json: params.{name}"
    for name in (*PLACEMENT, *(".".join(field) for field in PLACEMENT_FIELDS.items()))
)

TOLD_ALONE = (
    "run.json: name", "run.json: started", "run.json: added",
    "run.json: tags.lockstep.note", "run.json: tags.lockstep.record_error", "run.json: tags.lockstep.folder", "run.json: tags.lockstep.job",
    "run.json: tags.lockstep.heartbeat", "run.json: tags.lockstep.beat", "run.json: tags.lockstep.host", "run.json: tags.lockstep.process",
    "run.json: tags.added",
)  # fmt: skip
"""What a seal does not hold: the run's state in its store, as far as neither spec nor journal give it."""


@pytest.mark.scenario
def test_whatever_is_changed_alone_in_a_finished_runs_folder_is_found(run: Path, tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    assert not disagrees(run, aside), "the control"
    kept = shutil.copytree(run, tmp_path / "kept")
    accepted, count = [], 0
    for what, change in changes_alone(run):
        change()
        count += 1
        if not disagrees(run, aside) and not what.startswith(PARAMS_OF_PLACEMENT):
            accepted.append(what)
        name = what.partition(": ")[0]
        (run / name).unlink(missing_ok=True)
        if (kept / name).exists():
            shutil.copyfile(kept / name, run / name)
    assert not disagrees(run, aside), "everything was put back"
    assert count > 300
    assert set(accepted) == set(TOLD_ALONE)


# --- changed in every place, and sealed again ------------------------------------------------------------------


def rewritten(run: Path, journal: list[bytes]) -> None:
    """Have all of a run's folder say what these lines of its journal say, by Lockstep's own hand, and seal it."""
    (run / "journal.jsonl").write_bytes(b"".join(journal))
    for name in ("ledger.parquet", "evaluations.parquet", "observations.parquet"):
        (run / name).unlink(missing_ok=True)
    with closing(Journal(run, read_only=True)) as log:
        assert list(final_tables.write(log, run))
    put_state(run)
    seal(run)


def as_line(event: dict[str, Any]) -> bytes:
    text = json.dumps(event, separators=(",", ":")).encode()
    return b"%s %08x\n" % (text, zlib.crc32(text))


PROVEN_EVENTS = {"step": "ledger.parquet", "evaluation": "evaluations.parquet"}
STEP = ("step", "epoch", "samples", "loss", "weight", "parts", "lr", "grad_norm", "clipped_norm", "scale", "skipped", "data_wait_s", "step_s", "wall_clock", "attempt", "digests")  # fmt: skip
EVALUATION = ("step", "epoch", "metrics", "seconds", "wall_clock")
PROVEN_FACTS = ("identity", "fields", "seeds")


def is_told(where: Path_) -> bool:
    """Whether the list of what is told covers a value of the journal."""
    kind, *rest = where
    match kind, rest:
        case "step", [int(i), *_]:
            return STEP[i] in TOLD["ledger.parquet"]
        case "evaluation", [int(i), *_]:
            return EVALUATION[i] in TOLD["evaluations.parquet"]
        case "started", ["environment", *_]:
            return "*" in TOLD["environment.json"]
        case "started", [str(name), *_]:
            return name not in PROVEN_FACTS
        case "finished", ["summary", str(name), *_]:
            return name in TOLD["summary.json"]
        case "finished", ["at" | "added" | "files", *_]:
            return True
    return kind not in ("step", "evaluation", "started", "finished")


class Taken:
    """Steps that were taken again once: they depend on the spec and the source, not on the journal."""

    def __init__(self) -> None:
        self.replayed: Replayed | None = None
        self.weights: Path | None = None


def verified(run: Path, taken: Taken, aside: Path) -> Verified:
    """As `lockstep verify --all` has it, but that the steps are taken once for all."""
    from lockstep.calls.executions import execution_of
    from lockstep.driver.options import RunOptions
    from lockstep.proof.execution import take_steps

    recorded = recorded_run(run.name, "off", run.parent)

    def take(spec: Any, replay: Any, watch: Any, weights: Path | None) -> Replayed:
        if taken.replayed is None:
            with execution_of(recorded, RunOptions(local=True), sandboxed=False) as execution:
                taken.replayed = take_steps(execution, spec, replay, watch, weights=weights)
            assert weights is not None
            taken.weights = Path(shutil.copytree(weights, aside / "taken"))
        elif weights is not None and taken.weights is not None:
            shutil.copytree(taken.weights, weights, dirs_exist_ok=True)
        shown = taken.replayed
        return Replayed(shown.fields, shown.facts, dict(shown.steps), dict(shown.evaluations), shown.summary)

    folder = aside / f"aside-{len(list(aside.iterdir()))}"
    folder.mkdir()
    return verify(recorded, [whole(recorded.last_step)], take, folder)


@pytest.mark.scenario
def test_whatever_is_changed_in_every_place_and_sealed_again_is_found_or_named_as_told(
    run: Path, tmp_path: Path
) -> None:
    """The forger has Lockstep, and rewrites the whole folder from a journal with one other value."""
    aside, taken = tmp_path / "aside", Taken()
    aside.mkdir()
    events = [json.loads(line[:-9]) for line in (run / "journal.jsonl").read_bytes().splitlines()]
    rewritten(run, [as_line(event) for event in events])
    control = verified(run, taken, aside)
    assert control.same and not control.fields and not control.facts, control
    kept = shutil.copytree(run, tmp_path / "kept")
    accepted, refused = [], []
    seen: set[str] = set()
    for i, event in enumerate(events):
        ((kind, value),) = event.items()
        if kind in ("step", "observation") and kind in seen:
            continue  # one of a kind
        seen.add(kind)
        for where in leaves(value, (kind,)):
            forged = as_line(changed(event, where))
            lines = [forged if j == i else as_line(other) for j, other in enumerate(events)]
            try:
                rewritten(run, lines)
                found = verified(run, taken, aside)
                named = bool(found.fields or found.facts) or not found.ended
                (accepted if found.same and not named else refused).append(where)
            except (LockstepError, AssertionError):
                refused.append(where)
            shutil.rmtree(run)
            shutil.copytree(kept, run)
    assert [where for where in accepted if not is_told(where)] == []
    assert len(refused) > 100 and {"started", "step", "evaluation", "finished"} <= {
        where[0] for where in refused
    }
    for name in ("workers", "steps_per_s"):
        assert ("finished", "summary", name) in accepted, "told, or the list has a name too many"


# --- the list ---------------------------------------------------------------------------------------------------


def test_what_is_told_is_stated_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guarantees.md").read_text()
    section = page.partition("## What a record proves")[2].partition("\n## ")[0]
    for name, fields in TOLD.items():
        assert f"`{name}`" in section, name
        for field in fields:
            assert field == "*" or field in section, (name, field)


def test_every_document_of_a_run_is_sealed_or_named(run: Path) -> None:
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    apart = ("step-*", "holds/*", "owner.json", "attempt.json", SEAL, "run.json")
    assert {
        name for name in names - sealed_files(run).keys() if not any(fnmatch(name, one) for one in apart)
    } == set()
