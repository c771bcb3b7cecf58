"""Memory that the processes of a node share: made once, seen by all, gone with the last user however that one ends."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import node_folder, problems
from lockstep.data.node_folder import NodeFolder, mapped_array
from tests.raised import raises

ROOT = Path(__file__).parents[3]

USER = """
import sys, time
from pathlib import Path
import numpy as np
from lockstep.data import node_folder
node_folder.MEMORY = Path(sys.argv[1])
def fill(ids):
    with open(sys.argv[2], "a") as log: log.write("made\\n")
    time.sleep(0.2)
    ids[:] = np.arange(len(ids))
array = node_folder.mapped_array("shared", 5000, np.int64, fill)
assert array[4999] == 4999
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(node_folder, "MEMORY", folder)
    return folder


def inside(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.glob("lockstep-*/*"))


def users(count: int, memory: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
    command = [sys.executable, "-c", USER, str(memory), str(log)]
    return iter(
        [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            for _ in range(count)
        ]
    )


def test_processes_share_what_one_of_them_made(memory: Path, tmp_path: Path) -> None:
    """The last one that ends deletes it."""
    log = tmp_path / "log"
    started = list(users(3, memory, log))
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    assert log.read_text() == "made\n"
    for i, process in enumerate(started):
        assert len(inside(memory)) == 2, i
        process.communicate("")
        assert process.returncode == 0
    assert inside(memory) == []


def test_what_killed_processes_left_is_deleted_by_the_next(memory: Path, tmp_path: Path) -> None:
    (process,) = users(1, memory, tmp_path / "log")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(inside(memory)) == 2
    folder = NodeFolder("another", 10)
    assert inside(memory) == [folder.path.name, f"{folder.path.name}.lock"]
    folder.close()
    assert inside(memory) == []


def test_what_is_in_use_is_not_swept(memory: Path) -> None:
    used = mapped_array("used", 10, np.int64, lambda ids: ids.fill(7))
    NodeFolder("another", 10).close()
    assert len(inside(memory)) == 2
    assert used.tolist() == [7] * 10
    del used
    assert inside(memory) == []


def test_a_forked_process_leaves_its_parents_folder(memory: Path) -> None:
    folder = NodeFolder("parent", 10)
    child = os.fork()
    if not child:
        folder.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(inside(memory)) == 2
    folder.close()
    assert inside(memory) == []


def test_a_file_that_was_cut_short_by_a_kill_is_made_anew(memory: Path) -> None:
    """It is written aside, so that it is there whole or not at all."""
    folder = NodeFolder("torn", 10)

    def dies(aside: Path) -> None:
        aside.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.file("a", dies)
    path = folder.file("a", lambda aside: aside.write_bytes(b"whole") and None)
    assert path is not None
    assert path.read_bytes() == b"whole"
    folder.close()


def test_too_little_room_is_told(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_folder.tempfile, "gettempdir", lambda: str(memory))
    with raises(problems.NO_ROOM, required=re.compile(r"^\d+ MiB$")):
        NodeFolder("huge", 1 << 60)


def test_where_memory_has_no_room_the_disk_is_used(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_folder, "MEMORY", tmp_path / "is not there")
    monkeypatch.setattr(node_folder.tempfile, "gettempdir", lambda: str(memory))
    assert NodeFolder("a", 10).path.parent.parent == memory


def test_the_folder_is_the_users_alone(memory: Path) -> None:
    folder = NodeFolder("mine", 10)
    assert stat.S_IMODE(folder.path.parent.stat().st_mode) == 0o700
    folder.path.parent.chmod(0o777)
    other = NodeFolder("mine", 10).path.parent
    assert other != folder.path.parent
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
