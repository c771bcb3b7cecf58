"""What a recorded run, a statement or a repository can be refused for is told as the problem that it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import Problem
from lockstep.proof import problems, protocol, signatures
from lockstep.proof.recorded_run import copy_checkpoint, folder_of, plain_name, recorded_fields
from lockstep.proof.repository import Repository
from lockstep.proof.run_diff import difference
from lockstep.proof.statement import parsed
from lockstep.spec.loading import load_spec
from tests.raised import raises

RUN = "f" * 32


def fields(folder: Path, write: Callable[[Path], Any]) -> Any:
    """The recorded fields of a run whose fields.json is written by `write`."""
    (folder / RUN).mkdir()
    (folder / RUN / "spec.yaml").touch()
    write(folder / RUN / "fields.json")
    return recorded_fields("off", RUN, folder / RUN)


def copied(folder: Path) -> Any:
    RunFolder.create(open_storage(str(folder / "runs")), RUN)
    return copy_checkpoint(str(folder / "runs"), RUN, 7, folder / "aside")


def compared(folder: Path) -> Any:
    sides: list[Any] = [SimpleNamespace(steps=dict.fromkeys(steps)) for steps in ((1, 2), (5, 6))]
    return difference(*sides, folder)


ENVELOPE = {"payload": "e30=", "payloadType": "text/plain", "signatures": [{"sig": "AA==", "keyid": "k"}]}
STATED = {"_type": "x", "predicateType": "y", "predicate": {"run": RUN}}

CALLS: list[tuple[Callable[[Path], Any], Problem[Any], dict[str, Any]]] = [
    (lambda here: folder_of("../x", load_spec({"job": {"use": "a:B"}}), here), problems.NO_RUN_ID, {}),
    (lambda here: fields(here, lambda path: path.write_text("{")), problems.UNREADABLE, {"run": RUN, "what": "fields.json"}),
    (lambda here: fields(here, lambda path: path.symlink_to("/etc/hostname")), problems.LINK, {"run": RUN}),
    (copied, problems.NO_WHOLE_CHECKPOINT, {"run": RUN, "which": " of step 7"}),
    (lambda _: plain_name("../weights"), problems.FOREIGN_FILE, {"got": "../weights"}),
    (compared, problems.NO_COMMON_STEP, {"got": "1 to 2 and 5 to 6"}),
    (lambda _: protocol.parsed(b"what a job printed\n"), problems.PROTOCOL, {"got": "a line that is no JSON"}),
    (lambda _: parsed(b"{}"), problems.NO_STATEMENT, {}),
    (lambda _: parsed(json.dumps(STATED).encode()), problems.OTHER_KIND, {}),
    (lambda _: signatures.opened({"payloadType": 3}, None), problems.NO_ENVELOPE, {}),
    (lambda _: signatures.opened(ENVELOPE, None), problems.OTHER_PAYLOAD, {"wanted": signatures.PAYLOAD_TYPE}),
    (lambda here: Repository(here).title("nowhere"), problems.GIT_FAILED, {"command": "show"}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "problem", "facts"), CALLS, ids=[it[1].code for it in CALLS])
def test_a_mistake_is_told(
    call: Callable[[Path], Any], problem: Problem[Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    with raises(problem, **facts) as raised:
        call(tmp_path)
    assert "\n" not in str(raised.value)


def test_what_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "securesystemslib.dsse", None)
    with raises(problems.NO_SIGNATURES):
        signatures.opened(ENVELOPE, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(problems.NO_GIT):
        Repository.around(tmp_path)
