"""Encoded images in files, a class in each folder; and what decodes them.

Pillow is imported when the first image is decoded: `pip install 'lockstep-train[images]'`.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

from torch.utils.data import Dataset

from lockstep.data import problems
from lockstep.data.file_locations import StoredFile, find, one_line
from lockstep.data.fingerprint import FILES, content_digest

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Endings of the files that are read, in small letters or large."""


class EncodedImage(NamedTuple):
    """The bytes of an image file, the number of its class, and its name."""

    content: bytes
    label: int
    name: str


class ImageFolder(Dataset[EncodedImage]):
    """The image files below a folder, in the order of their paths; the first folder of a file's name is its class.

    `source` is a folder or a URI of an object store; `classes` are the names of the folders in the order of their numbers, by default
    sorted. The fingerprint covers the names and sizes of all files and the contents of up to 256 of them, with `content="full"` of all.
    Raises DataError for a file that is in no class folder, and for a class folder without an image; where `classes` are given, a folder
    of another name is passed over if it has none, and a class may be empty.
    """

    draws_nothing = True

    def __init__(
        self,
        source: str | os.PathLike[str],
        classes: Sequence[str] | None = None,
        *,
        content: Literal["sampled", "full"] = "sampled",
    ) -> None:
        self.files, self.content = find(source, IMAGES), content
        self._names = [file.name for file in self.files]
        folders = [_class(file) for file in self.files]
        self.classes = sorted(set(folders)) if classes is None else list(classes)
        numbers = {name: i for i, name in enumerate(self.classes)}
        strange = next((i for i, folder in enumerate(folders) if folder not in numbers), None)
        if strange is not None:
            raise problems.OTHER_CLASS(
                file=self.files[strange].shown, got=folders[strange], wanted=", ".join(self.classes)
            )
        self._check_folders(set(folders), None if classes is None else set(numbers))
        self.labels = [numbers[folder] for folder in folders]

    def _check_folders(self, occupied: set[str], named: set[str] | None) -> None:
        location = self.files[0].location
        for folder in location.folders():
            if folder in occupied or (named is not None and folder not in named):
                continue
            endings = ", ".join(sorted(ending or "none" for ending in location.endings(folder)))
            if named is None or endings:
                raise problems.NO_IMAGE(
                    folder=f"{location.shown}/{folder}",
                    got=f"files with the endings {endings}" if endings else "no files",
                    wanted=", ".join(IMAGES),
                )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> EncodedImage:
        file = self.files[index]
        (content,) = file.pieces([(0, file.size)])
        return EncodedImage(content, self.labels[index], file.shown)

    def fingerprint(self) -> dict[str, Any]:
        """The classes, and one hash over the files."""
        count = len(self.files)
        read = (
            {i * (count - 1) // (FILES - 1) for i in range(FILES)} if self.content != "full" else range(count)
        )
        hasher = hashlib.sha256()
        for i, (name, file) in enumerate(zip(self._names, self.files, strict=True)):
            digest = content_digest(file.identity, file.size, file.pieces, "full") if i in read else ""
            hasher.update(f"{name}|{file.size}|{digest}\n".encode())
        return {"classes": ", ".join(self.classes), "files": f"{count}, {hasher.hexdigest()[:32]}"}


def opened_image(content: bytes, name: str) -> Any:
    """An encoded image as one of Pillow in RGB, all of it read. DataError with its name where it is damaged or no image."""
    try:
        from PIL import Image
    except ImportError as error:
        raise problems.PILLOW_MISSING(got=error) from error
    try:
        with Image.open(io.BytesIO(content)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise problems.NO_DECODABLE_IMAGE(file=name, got=one_line(error)) from error


def _class(file: StoredFile) -> str:
    parts = PurePosixPath(file.name).parts
    if len(parts) < 2:
        raise problems.NO_CLASS_FOLDER(file=file.shown)
    return parts[0]
