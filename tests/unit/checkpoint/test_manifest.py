"""G5: a manifest is exactly what was written, or it is refused with what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.manifest import VERSION, Facts, FileEntry, Manifest
from lockstep.errors import JobError
from lockstep.parsing import with_hash
from tests.raised import raises
from tests.unit.checkpoint.states import FACTS, nan, same

ENTRY = FileEntry("model.a0003.r0000.safetensors", "model", "tensors", 12, "0" * 64)
MANIFEST = Manifest("run-a", 7, 3, 1700000000.25, (ENTRY,), FACTS)


def forged(**changes: Any) -> bytes:
    """A manifest with other content, whose hash is right."""
    document = json.loads(MANIFEST.encode())
    document.pop("sha256")
    document |= changes
    return with_hash(document)


def test_a_manifest_comes_back() -> None:
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST
    assert Manifest.decode(forged()) == MANIFEST


def test_facts_are_exact() -> None:
    facts = Facts(
        counters={"a": nan(7), "b": 2**70, "c": (1, None), "d": {3: -0.0}}, metrics={"x": math.nan, "y": 1}
    )
    found = Manifest.decode(dataclasses.replace(MANIFEST, facts=facts).encode()).facts
    assert same(found.counters, facts.counters) and same(found.metrics, facts.metrics)


def test_every_changed_byte_is_noticed() -> None:
    text = MANIFEST.encode()
    for position in range(len(text)):
        for bit in (1, 1 << position % 7, 128):
            changed = bytearray(text)
            changed[position] ^= bit
            with pytest.raises(BadCheckpointError):
                Manifest.decode(bytes(changed))


def test_every_missing_end_is_noticed() -> None:
    text = MANIFEST.encode()
    for length in range(len(text)):
        with pytest.raises(BadCheckpointError):
            Manifest.decode(text[:length])
    for more in (b"\n", b" ", b"{}", text):
        with pytest.raises(BadCheckpointError):
            Manifest.decode(text + more)


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1, 10**9])
def test_another_format_is_refused_as_such(version: int) -> None:
    """Whatever else its manifest holds, and however it hashes itself."""
    other = json.dumps({"format": "lockstep-checkpoint", "version": version, "shards": "elsewhere"}).encode()
    with raises(problems.OTHER_FORMAT, got=version, wanted=VERSION):
        Manifest.decode(other)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "manifest.json",
        "model.a0003.r0000.json",
        "other.a0003.r0000.safetensors",
        "model.a0003.r0000.pkl",
        "receipt.a0003.r0000.part",
        "model.a0003.r0000.safetensors/..",
        "",
        3,
    ],
)
def test_a_file_that_could_lie_anywhere_is_refused(name: Any) -> None:
    """Loading reads and retention deletes what a manifest names."""
    entry = {**dataclasses.asdict(ENTRY), "name": name}
    with pytest.raises(BadCheckpointError):
        Manifest.decode(forged(files=[entry]))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"version": True},
        {"version": "1"},
        {"format": "other"},
        {"run": 3},
        {"step": "7"},
        {"step": 7.0},
        {"attempt": None},
        {"written_at": 3},
        {"files": 3},
        {"files": [[]]},
        {"files": [{"name": "x"}]},
        {"files": [dataclasses.asdict(ENTRY)] * 2},
        {"files": [{**dataclasses.asdict(ENTRY), "size": -1}]},
        {"files": [{**dataclasses.asdict(ENTRY), "size": 1.0}]},
        {"files": [{**dataclasses.asdict(ENTRY), "sha256": "00"}]},
        {"counters": [1]},
        {"counters": {"$tensor": "x"}},
        {"metrics": {"eval/loss": "low"}},
        {"metrics": {"eval/loss": True}},
    ],
)
def test_a_manifest_that_is_not_complete_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpointError) as raised:
        Manifest.decode(forged(**changes))
    assert "\n" not in str(raised.value)


def test_facts_that_are_not_plain_are_refused() -> None:
    import torch

    for facts in (
        Facts(counters={"x": torch.ones(1)}),
        Facts(environment={"x": object()}),
        Facts(metrics={"x": "y"}),
    ):  # type: ignore[dict-item]
        with pytest.raises((JobError, TypeError)):
            dataclasses.replace(MANIFEST, facts=facts).encode()
