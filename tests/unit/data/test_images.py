"""Folders of encoded images: classes, contents, fingerprint, and what is no image."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image

from jobs.images.sample import CLASSES, write_sample
from lockstep.data import ImageFolder, problems
from lockstep.data.images import opened_image
from tests.raised import raises


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sample(tmp_path / "all", 9, 12, seed=1)
    return tmp_path / "all"


def test_the_folder_of_a_file_is_its_class(folder: Path) -> None:
    data = ImageFolder(folder)
    assert data.classes == sorted(CLASSES)
    assert [data[i].label for i in range(9)] == [0] * 3 + [1] * 3 + [2] * 3
    assert [Path(data[i].name).parent.name for i in (0, 3, 6)] == sorted(CLASSES)
    assert opened_image(data[0].content, data[0].name).size == (12, 12)
    named = ImageFolder(folder, ("stripes", "square", "disc"))
    assert named.labels == [2] * 3 + [1] * 3 + [0] * 3


def test_the_fingerprint_shows_names_and_contents(folder: Path) -> None:
    before = ImageFolder(folder).fingerprint()
    assert ImageFolder(folder).fingerprint() == before
    first = next((folder / "disc").iterdir())
    content = first.read_bytes()
    first.write_bytes(content[:-1] + b"?")
    assert ImageFolder(folder).fingerprint() != before
    first.write_bytes(content)
    first.rename(folder / "square" / "other.png")
    assert ImageFolder(folder).fingerprint() != before


@pytest.mark.parametrize(
    "ending", [".JPG", ".Jpeg", ".PNG", ".pgm", ".ppm", ".bmp", ".TIF", ".tiff", ".webp", ".gif"]
)
def test_images_are_known_by_their_endings_in_any_letters(tmp_path: Path, ending: str) -> None:
    """A class whose images all have such an ending keeps its number, and the others theirs."""
    for name in ("a/0.jpg", f"b/0{ending}", "c/0.png", "c/notes.txt", ".d/0.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if not name.endswith("txt"):
            kind = Image.registered_extensions()[Path(name).suffix.lower()]
            Image.new("L", (4, 4), 100).save(tmp_path / name, format=kind)
    (tmp_path / "c" / "notes.txt").write_text("not read")
    data = ImageFolder(tmp_path)
    assert data.classes == ["a", "b", "c"]
    assert [Path(data[i].name).name for i in range(3)] == ["0.jpg", f"0{ending}", "0.png"]
    assert [opened_image(data[i].content, "").size for i in range(3)] == [(4, 4)] * 3


def test_a_class_folder_without_an_image_is_told(folder: Path) -> None:
    (folder / "cross" / "below").mkdir(parents=True)
    endings = re.compile(r"^\.jpg, ")
    with raises(problems.NO_IMAGE, folder=folder / "cross", got="no files", wanted=endings):
        ImageFolder(folder)
    assert len(ImageFolder(folder, [*CLASSES, "cross"])) == 9
    (folder / "cross" / "below" / "a.heic").write_bytes(b"")
    got = "files with the endings .heic"
    for classes in (None, [*CLASSES, "cross"]):
        with raises(problems.NO_IMAGE, folder=folder / "cross", got=got, wanted=endings):
            ImageFolder(folder, classes)
    assert ImageFolder(folder, sorted(CLASSES)).labels == [0] * 3 + [1] * 3 + [2] * 3


def test_a_folder_whose_name_could_be_a_glob_is_a_folder(folder: Path) -> None:
    before = ImageFolder(folder).fingerprint()
    for name in ("img [v2]", "img*", "what?"):
        moved = shutil.copytree(folder, folder.parent / name)
        assert ImageFolder(moved).fingerprint() == before
    assert len(ImageFolder(f"{folder.parent}/a[l-m]l/*/*")) == 9


def test_an_image_that_changes_in_a_run_is_told(folder: Path) -> None:
    data = ImageFolder(folder)
    file = Path(data[4].name)
    time.sleep(0.01)  # a tick of the file system's clock
    file.write_bytes(file.read_bytes()[::-1])
    assert data[3].content
    with raises(
        problems.FILE_CHANGED, path=file, got=re.compile("^it was written at"), size=file.stat().st_size
    ):
        data[4]


def test_what_does_not_fit_is_told(folder: Path) -> None:
    stripes = re.compile(f"^{folder}/stripes/")
    with raises(problems.OTHER_CLASS, file=stripes, got="stripes", wanted="disc, square"):
        ImageFolder(folder, ("disc", "square"))
    with raises(problems.NO_DECODABLE_IMAGE, file="a.txt", got=re.compile("cannot identify image file")):
        opened_image(b"not an image", "a.txt")
    (folder / "stray.png").write_bytes(b"")
    with raises(problems.NO_CLASS_FOLDER, file=folder / "stray.png"):
        ImageFolder(folder)
    with raises(problems.NO_FILES, path=folder.parent / "nothing", wanted=re.compile(r"^\.jpg, ")):
        (folder.parent / "nothing").mkdir()
        ImageFolder(folder.parent / "nothing")
