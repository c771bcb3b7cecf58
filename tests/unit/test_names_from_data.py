"""Rooms that read what strangers wrote make paths of names in one way, `lockstep.paths`, and open no file past its bounds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lockstep

PLATFORM = Path(lockstep.__file__).parent
FOREIGN = (
    "checkpoint/storage/local.py",
    "checkpoint/manifest.py",
    "checkpoint/reader.py",
    "record/mirror/checkpoint_copies.py",
    "record/ledger/journal.py",
    "record/events/codec.py",
    "record/mirror/projection.py",
    "record/mirror/reconciler.py",
    "record/mirror/run_files.py",
    "record/mirror/mlflow/models.py",
    "record/mirror/mlflow/reading.py",
    "proof/recorded_run.py",
    "proof/statement.py",
)
"""Modules in which names come from a manifest, a journal, a statement or a store."""

KNOWN = {
    "checkpoint/storage/local.py": {"path", "folder"},  # only for messages: `_at` makes the path
    "record/mirror/mlflow/models.py": {"file.name", "GRAPH.parent"},  # of a file that was listed on this disk
    "record/mirror/checkpoint_copies.py": {"folder.name", "self._bytes_per_s"},  # a step's folder; a number
    "record/events/codec.py": {"name"},  # which `_check` refuses
    "record/mirror/projection.py": {"path.name"},  # for messages
    "record/mirror/reconciler.py": {"name"},  # which `RunFiles` has checked
    "proof/statement.py": {"f'{name}.safetensors'"},  # names that the module has itself
    "proof/recorded_run.py": {
        "run_id",
        "prefix",
        "name",
        "f'copy-{self.run_id}-{step}'",
        "step_folder(checkpoint.step)",
        "plain_name(entry.name)",  # refuses whatever is no plain file name
        "checkpoint.name",  # of a folder that was listed
    },  # what a person names; constants of the module
    "record/mirror/mlflow/reading.py": {"name"},  # of files that the caller's code names
}
"""What is joined to a path all the same, and why it may be."""
SAFE_CALLS = {"component", "relative", "beneath"}
OPENERS = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}


def joined(source: str) -> set[str]:
    """What is joined to a path and is no constant, nor what `lockstep.paths` has checked."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = [node.right]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"Path", "os.path.join"}:
            parts = node.args[1:]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "joinpath"
        ):
            parts = node.args
        found |= {ast.unparse(part) for part in parts if not is_checked(part)}
    return found


def is_checked(part: ast.expr) -> bool:
    match part:
        case ast.Constant():
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper()
        case ast.Call(func=ast.Name(id=name)):
            return name in SAFE_CALLS
    return False


def opened(source: str) -> set[str]:
    """The calls that read or write a file without `lockstep.paths`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {
        node.func.attr for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr in OPENERS
    }
    return names | {
        node.func.id for node in calls if isinstance(node.func, ast.Name) and node.func.id == "open"
    }


MAY_OPEN = {
    "checkpoint/storage/local.py": {"open", "write_bytes"},  # what `_at` has made
    "checkpoint/reader.py": {"open"},  # of a storage
    "record/mirror/checkpoint_copies.py": {"open"},
    "proof/recorded_run.py": {"open", "write_bytes"},  # of a storage; of the copy that is handed over
    "proof/statement.py": {"read_bytes"},  # of weights, to hash them
}


@pytest.mark.parametrize("module", FOREIGN)
def test_names_from_data_become_paths_in_one_way(module: str) -> None:
    source = (PLATFORM / module).read_text(encoding="utf-8")
    assert joined(source) == KNOWN.get(module, set()) & joined(source)
    assert opened(source) <= MAY_OPEN.get(module, set())


@pytest.mark.parametrize(
    "line",
    [
        "folder / name",
        "folder / entry['name']",
        "Path(folder, name)",
        "folder.joinpath(name)",
        "os.path.join(a, b)",
        "folder / f'{name}'",
    ],
)
def test_a_join_past_the_builder_is_seen(line: str) -> None:
    """The control."""
    assert joined(line)
    assert not joined(
        "folder / 'run.json'; folder / NAME; folder / layout.OWNER; folder / component(name); beneath(folder, name)"
    )


def test_a_file_that_is_opened_past_the_bounds_is_seen() -> None:
    assert opened("path.read_text()") == {"read_text"} and opened("open(name)") == {"open"}


OWN_CHANNELS = (
    "attempts/", "checks/", "clusters/", "data/", "hf/", "sweeps/search.py", "training/read_relay.py", "calls/subprocess_call.py", "proof/guard.py", "proof/guard_worker.py", "calls/verify.py",
    "record/runs/heartbeat.py", "driver/resume_hint.py", "spec/schema.py", "spec/fields.py", "views/tensorboard.py", "parsing.py",
    "training/integrity/rehearsal/child_process.py", "driver/guardian.py", "record/runs/abandoned_run.py", "proof/sandbox_entry.py", "calls/executor.py", "proof/protocol.py", "proof/execution.py", "calls/executions.py",
)  # fmt: skip
"""What parses only what this process or one that it started wrote, a person's own data, or a value on the command line."""


def parsed(source: str) -> set[str]:
    """The calls that parse a text without bounds; what this module has just written is no stranger's."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    unbounded = {
        "json.load",
        "json.loads",
        "yaml.load",
        "yaml.safe_load",
        "yaml.safe_load_all",
        "pickle.loads",
    }
    return {
        ast.unparse(call)
        for call in calls
        if ast.unparse(call.func) in unbounded and not isinstance(call.args[0], ast.Call)
    }


@pytest.mark.scenario
def test_documents_are_parsed_within_bounds() -> None:
    modules = [path for path in PLATFORM.rglob("*.py") if "starters" not in path.parts]
    names = {path.relative_to(PLATFORM).as_posix(): path for path in modules}
    unbounded = {
        name: calls
        for name, path in names.items()
        if not name.startswith(OWN_CHANNELS) and (calls := parsed(path.read_text(encoding="utf-8")))
    }
    assert not unbounded
    assert parsed("json.loads(text)") and not parsed("json_value(text); json.loads(json.dumps(one))")
