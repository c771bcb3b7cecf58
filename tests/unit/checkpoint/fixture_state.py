"""The state in the fixtures of the checkpoint format. It never changes: fixtures that were written stay.

python -m tests.unit.checkpoint.fixture_state      writes the fixture of the current version, once
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.manifest import VERSION, Facts
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.tree import DTYPES
from tests.unit.checkpoint.one_process import write_checkpoint

FIXTURE_FACTS = Facts(
    identity="0123456789abcdef" * 4,
    identity_fields={
        "optimizer.lr": 0.003,
        "optimizer.betas": [0.9, 0.999],
        "clip_norm": None,
        "seed": 2**62,
    },
    environment={"torch": "2.13.0", "deterministic_algorithms": True},
    counters={"step": 7, "skipped": 1, "samples": 448, "weight_exponent": None, "best": float("inf")},
    metrics={"eval/loss": 0.1, "eval/accuracy": 1.0},
)


SHARED = {f"000000001-000000006.{'a' * 32}.{'b' * 16}.rows": bytes(range(256))}
"""What it shares."""


def fixture_state() -> dict[str, Any]:
    """Made of written-out values only, none that a library could come to draw differently."""
    counted = torch.arange(256, dtype=torch.uint8)
    nan = struct.unpack(">d", bytes.fromhex("fff8000000001234"))[0]
    tied = torch.tensor([1.5, -0.0, float("nan"), 1e-45])
    return {
        "model": {
            "embed.weight": tied,
            "head.weight": tied,
            "conv.weight": counted[:96].clone().view(torch.float32).view(2, 2, 2, 3).permute(0, 3, 1, 2),
            "norm.num_batches_tracked": torch.tensor(7),
            "nothing": torch.empty(0, 3),
            **{
                f"as.{name}": counted[: 2 * dtype.itemsize].clone().view(dtype)
                for name, dtype in DTYPES.items()
            },
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "max": None}, 1: {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "nesterov": False}],
        },
        "plain": {
            "floats": [0.1, -0.0, 1e-323, float("inf"), float("-inf"), nan],
            "numbers": [0, -(2**63), 2**64, True],
            "text": "Grüße\n\u0000 $",
            "$tensor": "a key that looks like a word",
            "keys": {None: 0, False: 1, 2: 3, 0.5: 4, "": 5},
            "empty": [[], (), {}],
        },
        "ledger": bytes(range(256)),
        "empty": b"",
    }


if __name__ == "__main__":
    folder = Path(__file__).parent / "fixtures" / f"format-{VERSION}"
    run = RunFolder.create(LocalStorage(folder), "fixture")
    write_checkpoint(run.claim(3), 7, fixture_state(), FIXTURE_FACTS, SHARED)
