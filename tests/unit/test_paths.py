"""A name in data leads nowhere outside its root: by its text, or through a symbolic link."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import paths
from lockstep.paths import OutsideError, beneath, component, moved, open_beneath, read_bounded, relative


@pytest.fixture(params=["openat2", "walked"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with links in and out, resolved by the kernel or part by part."""
    if request.param == "walked":
        monkeypatch.setattr(paths, "_known", [False])
    elif not paths._has_openat2():
        pytest.fail("this kernel has no openat2, which this test is about")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("secret")
    inside = tmp_path / "root"
    (inside / "folder").mkdir(parents=True)
    (inside / "folder" / "file").write_text("inside")
    (inside / "out").symlink_to("../out")
    (inside / "absolute").symlink_to(tmp_path / "out" / "secret")
    (inside / "dangling").symlink_to("../nowhere")
    (inside / "proc").symlink_to("/proc/self/root")
    os.mkfifo(inside / "pipe")
    yield inside


LEAD_OUT = ["out", "out/secret", "out/new", "absolute", "dangling", "dangling/new", "proc/etc/hostname"]
NO_NAMES = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "../out/secret",
    "folder/../../out",
    "a//b",
    "a/",
    "./a",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    3,
    None,
    "x" * 5000,
]


@pytest.mark.parametrize("name", [*LEAD_OUT, *NO_NAMES])
def test_a_name_that_leads_out_is_refused(root: Path, name: object) -> None:
    with pytest.raises(OutsideError):
        beneath(root, name)
    with pytest.raises(OutsideError):
        open_beneath(root, name)


@pytest.mark.parametrize("name", ["folder", "folder/file", "new", "new/folder/file", "...", "..a", "ä b"])
def test_a_sound_name_is_below_the_root(root: Path, name: str) -> None:
    """The control: what is there, and what is not there yet."""
    assert beneath(root, name) == root / name
    assert beneath(root / "not" / "there", name) == root / "not" / "there" / name


def test_a_file_is_read_and_a_pipe_is_not_waited_for(root: Path) -> None:
    with os.fdopen(open_beneath(root, "folder/file"), "rb") as file:
        assert file.read() == b"inside"
    with pytest.raises(OSError, match="wanted a file"):
        open_beneath(root, "pipe")
    with pytest.raises(OSError, match="wanted a file"):
        read_bounded(root / "pipe", 10)
    with pytest.raises(ValueError, match="it has 6 bytes, and at most 5 are read"):
        read_bounded(root / "folder" / "file", 5)


def test_a_link_within_the_root_is_followed_by_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert beneath(tmp_path, "link/new") == tmp_path / "link" / "new"


def test_a_folder_that_its_owner_moved_is_known(tmp_path: Path) -> None:
    """The controls: a link to a folder of another name, to a file, to nothing, to itself, one that lies deeper, and no link."""
    root, elsewhere = tmp_path / "root", tmp_path / "disk"
    for folder in (root / "deep", elsewhere / "run", elsewhere / "keys"):
        folder.mkdir(parents=True)
    (elsewhere / "file").touch()
    (root / "run").symlink_to("../disk/run")
    (root / "other").symlink_to(elsewhere / "keys")
    for name in ("file", "nothing"):
        (root / name).symlink_to(elsewhere / name)
    (root / "circle").symlink_to("circle")
    (root / "deep" / "run").symlink_to(elsewhere / "run")
    assert moved(root, "run") == elsewhere / "run"
    assert [moved(root, name) for name in ("other", "file", "nothing", "circle", "deep", "new")] == [None] * 6
    with pytest.raises(OutsideError):
        moved(root, "deep/run")


@pytest.mark.every(2)
@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
@pytest.mark.parametrize("given", ["link", "target", "root"])
def test_a_folder_that_another_user_has_a_part_in_is_not_taken_for_moved(tmp_path: Path, given: str) -> None:
    root, target = tmp_path / "root", tmp_path / "disk" / "run"
    for folder in (root, target):
        folder.mkdir(parents=True)
    (root / "run").symlink_to(target)
    assert moved(root, "run") == target
    os.chown({"link": root / "run", "target": target, "root": root}[given], 1234, -1, follow_symlinks=False)
    assert moved(root, "run") is None


def test_a_component_is_one_name() -> None:
    assert component("run-1.a") == "run-1.a"
    with pytest.raises(OutsideError):
        component("a/b")


@given(st.text())
def test_any_text_is_refused_or_below_the_root(name: str) -> None:
    try:
        path = Path(os.path.normpath(Path("/root/of", relative(name))))
    except OutsideError:
        return
    assert path.is_relative_to("/root/of") and path != Path("/root/of")
