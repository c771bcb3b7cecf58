"""Weights in files: what was saved comes back bit for bit, and what does not fit is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.errors import SpecError, StorageError
from lockstep.training.digest import weights_digest
from lockstep.training.weights import load_weights, save_weights


def model(width: int = 3) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, width, 3), nn.BatchNorm2d(width), nn.Conv2d(2, width, 3))
    net[2].weight = net[0].weight  # tied
    return net.to(memory_format=torch.channels_last)


def test_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Buffers, tied and oddly strided ones included."""
    saved, loaded = model(), model()
    saved[:2](torch.randn(2, 2, 5, 5))  # type: ignore[index]  # moves the statistics
    (path,) = save_weights(tmp_path, {"final": saved.state_dict()})
    assert path == tmp_path / "weights" / "final.safetensors"
    assert weights_digest(loaded.state_dict()) != weights_digest(saved.state_dict())
    load_weights(loaded, path)
    assert weights_digest(loaded.state_dict()) == weights_digest(saved.state_dict())


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    save_weights(tmp_path, {"final": model().state_dict(), "best": model().state_dict()})
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "best.safetensors",
        "final.safetensors",
    ]


@pytest.mark.parametrize("content", [None, b"", b"not weights", b"\x80\x04K\x01."])
def test_file_that_holds_no_weights(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        SpecError, match=r"^initial_weights: cannot read .*w\.safetensors.*safetensors file"
    ) as info:
        load_weights(model(), path)
    assert "\n" not in str(info.value)


def test_weights_of_another_model(tmp_path: Path) -> None:
    (path,) = save_weights(tmp_path, {"final": model(width=4).state_dict()})
    with pytest.raises(
        SpecError, match=r"^initial_weights: .* does not fit the job's model: .*size mismatch"
    ) as info:
        load_weights(model(), path)
    assert "\n" not in str(info.value)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.joinpath("weights").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match=r"^checkpoint\.storage: cannot write"):
        save_weights(tmp_path, {"final": model().state_dict()})
