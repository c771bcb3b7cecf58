"""Weights in files: what was saved comes back bit for bit, and what does not fit is told in one line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from lockstep import files
from lockstep.training import problems
from lockstep.training.integrity.state_digest import weights_digest
from lockstep.training.stored_weights import load_weights
from lockstep.training.weights import read_tensors, save_streamed, save_weights
from tests.live_bytes import counted
from tests.raised import raises


def model(width: int = 3) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, width, 3), nn.BatchNorm2d(width), nn.Conv2d(2, width, 3))
    net[2].weight = net[0].weight  # tied
    return net.to(memory_format=torch.channels_last)


def test_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Buffers, tied and oddly strided ones included."""
    saved, loaded = model(), model()
    saved[:2](torch.randn(2, 2, 5, 5))  # type: ignore[index]  # moves the statistics
    (path,) = save_weights(
        tmp_path, {"final": {k: v for k, v in saved.state_dict().items() if isinstance(v, torch.Tensor)}}
    )
    assert path == tmp_path / "weights" / "final.safetensors"
    assert weights_digest(loaded.state_dict()) != weights_digest(saved.state_dict())
    load_weights(loaded, str(path))
    assert weights_digest(loaded.state_dict()) == weights_digest(saved.state_dict())


def test_a_streamed_file_has_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Tied weights and other strides included; a rank without a path asks for the same tensors, in the same order."""
    saved = {k: v for k, v in model(64).state_dict().items() if isinstance(v, torch.Tensor)}
    saved |= {f"large.{i}": torch.randn(200, 100, dtype=torch.float64) for i in range(8)}
    saved |= {"half": torch.randn(5).half(), "none": torch.empty(0, 3), "alone": torch.tensor(2)}
    shapes = {name: value.to("meta") for name, value in saved.items()}
    asked: list[list[str]] = [[], []]

    def tensor(name: str, of: int) -> torch.Tensor:
        asked[of].append(name)
        return saved[name].clone()

    with counted() as live:
        (path,) = save_streamed(tmp_path / "weights" / "x.safetensors", shapes, lambda name: tensor(name, 0))
    assert save_streamed(None, shapes, lambda name: tensor(name, 1)) == []
    assert asked[0] == asked[1]
    assert live.peak <= 2 * 200 * 100 * 8
    assert weights_digest(safetensors.torch.load_file(path)) == weights_digest(saved)
    assert weights_digest(read_tensors(path)) == weights_digest(saved)


def test_all_tensors_are_asked_for_where_a_streamed_file_cannot_be_written(tmp_path: Path) -> None:
    """Other ranks send them, and would wait."""
    asked: list[str] = []
    (tmp_path / "weights").write_text("a file in the place of the folder")
    with raises(problems.WEIGHTS_UNWRITABLE):
        save_streamed(
            tmp_path / "weights" / "x.safetensors",
            {"b": torch.empty(3, device="meta"), "a": torch.empty(3, device="meta")},
            lambda name: asked.append(name),  # type: ignore[func-returns-value]
        )
    assert asked == ["a", "b"]


class Scaled(nn.Linear):
    """It keeps a number beside its weights."""

    scale = 2.0

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def test_weights_of_a_model_with_extra_state_come_back(tmp_path: Path) -> None:
    """A run's own files of weights have the tensors alone."""
    saved, loaded = Scaled(2, 2), Scaled(2, 2)
    (path,) = save_weights(
        tmp_path, {"final": {k: v for k, v in saved.state_dict().items() if isinstance(v, torch.Tensor)}}
    )
    load_weights(loaded, str(path))
    assert torch.equal(loaded.weight, saved.weight)
    assert loaded.scale == 2.0


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
    with raises(problems.WEIGHTS_UNREADABLE, path=path) as info:
        load_weights(model(), str(path))
    assert "\n" not in str(info.value)


def test_weights_of_another_model(tmp_path: Path) -> None:
    (path,) = save_weights(tmp_path, {"final": model(width=4).state_dict()})
    with raises(problems.OTHER_WEIGHTS, path=path, got=re.compile("size mismatch")) as info:
        load_weights(model(), str(path))
    assert "\n" not in str(info.value)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.joinpath("weights").write_text("a file where the folder should be")
    with raises(problems.WEIGHTS_UNWRITABLE):
        save_weights(tmp_path, {"final": model().state_dict()})


class Recorded:
    """The calls to the operating system by which files get their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unflushed: set[str] = set()
        self.named: list[str] = []
        names: dict[int, str] = {}
        opened, synced, replaced = os.open, os.fsync, os.replace

        def open_(path: Any, *arguments: Any, **options: Any) -> int:
            number = opened(path, *arguments, **options)
            names[number] = str(path)
            return number

        def fsync(number: int) -> None:
            synced(number)
            self.unflushed.discard(names[number])

        def replace(path: Any, target: Any) -> None:
            assert str(path) not in self.unflushed, f"{path} gets its name before its content is on the disk"
            replaced(path, target)
            self.named.append(str(target))
            self.unflushed.add(str(Path(target).parent))

        for name, call in (("open", open_), ("fsync", fsync), ("replace", replace)):
            monkeypatch.setattr(os, name, call)
        saved = safetensors.torch.save_file

        def save_file(tensors: Any, path: Any, metadata: Any) -> None:
            saved(tensors, path, metadata)
            self.unflushed.add(str(path))

        monkeypatch.setattr(safetensors.torch, "save_file", save_file)


def test_weights_stand_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is on the disk before it gets its name, and its folder after."""
    recorded = Recorded(monkeypatch)
    save_weights(tmp_path, {"final": {"w": torch.ones(3)}, "best": {"w": torch.zeros(3)}})
    assert [Path(name).name for name in recorded.named] == ["final.safetensors", "best.safetensors"]
    assert recorded.unflushed == set()


@pytest.mark.parametrize("kind", ["files", "folders"])
def test_a_flush_that_is_left_out_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Negative control."""
    real = files.flush
    recorded = Recorded(monkeypatch)
    monkeypatch.setattr(
        files, "flush", lambda path: None if path.is_dir() == (kind == "folders") else real(path)
    )
    with pytest.raises(AssertionError):
        save_weights(tmp_path, {"final": {"w": torch.ones(3)}})
        assert recorded.unflushed == set()
