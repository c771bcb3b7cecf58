"""Folders of encoded images: classes, contents, fingerprint, and what is no image."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.images.sample import CLASSES, write_sample
from lockstep.data import ImageFolder
from lockstep.data.images import opened_image
from lockstep.errors import DataError


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


def test_what_does_not_fit_is_told(folder: Path) -> None:
    with pytest.raises(DataError, match=r"^data: '.*stripes/.*' is of class 'stripes', wanted disc, square$"):
        ImageFolder(folder, ("disc", "square"))
    with pytest.raises(
        DataError, match=r"^data: 'a\.txt' cannot be decoded: .*; the file is damaged, cut short, or no image"
    ):
        opened_image(b"not an image", "a.txt")
    (folder / "stray.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"^data: '.*/stray\.png' lies in no class"):
        ImageFolder(folder)
    with pytest.raises(DataError, match=r"^data: there is no file for '.*/nothing'; wanted \.jpg"):
        (folder.parent / "nothing").mkdir()
        ImageFolder(folder.parent / "nothing")
