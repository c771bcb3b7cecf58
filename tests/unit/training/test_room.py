"""A second process of the run is started only where there is memory for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.training.integrity.resume_check import memory_room

MB = 1 << 20


def group(folder: Path, most: str, used: int, files: int, names: tuple[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {files}\n")


NEW, OLD = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize(
    ("line", "below", "names"),
    [("0::/pod/run", "pod", NEW), ("0::/", "", NEW), ("4:cpu,memory:/pod/run", "memory/pod", OLD)],
)
def test_the_limit_of_a_container_counts(
    tmp_path: Path, line: str, below: str, names: tuple[str, str]
) -> None:
    own = tmp_path / "cgroup"
    own.write_text(f"1:name=systemd:/elsewhere\n{line}\n")
    group(tmp_path / below, str(1000 * MB), 700 * MB, 100 * MB, names)
    group(tmp_path / below / "run", "max", 700 * MB, 0, names)
    _, left = sorted({1 << 62, *memory_room._of_groups(tmp_path, own)}, reverse=True)
    assert left == 350 * MB


def test_without_control_groups_only_the_machine_counts(tmp_path: Path) -> None:
    assert list(memory_room._of_groups(tmp_path, tmp_path / "none")) == [1 << 62]


def test_room_is_what_this_process_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_room.lacking_memory(torch.device("cpu")) == ""
    monkeypatch.setattr(memory_room, "_of_machine", lambda: 5_000_000)
    assert "of which 5 MB can be had" in memory_room.lacking_memory(torch.device("cpu"))
