"""A small residual net on encoded images: a folder with a folder for each class, or a column of a table.

Shapes: B images in a micro-batch, S pixels of a side, W channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep.data import ImageFolder, Table
from lockstep.data.images import EncodedImage, opened_image


class Images(lockstep.Job):
    """Tells the class of an image."""

    class Params(lockstep.Params):
        train: lockstep.Placement[str]
        evaluation: lockstep.Placement[str | None] = None
        """Folders with a folder for each class; or tables, with an encoded image in each row."""
        classes: tuple[str, ...] | PositiveInt | None = None
        """Names of the classes in order; of a table, whose labels are numbers, how many there are. None: the folders of `train`."""
        image: str = "image"
        label: str = "label"
        """Columns of a table."""
        size: int = Field(default=32, ge=8)
        width: PositiveInt = 16
        smallest: float = Field(default=0.5, gt=0, le=1)
        """Share of an image that a random crop has at least; 1 for no crop."""
        flip: bool = True
        colour: NonNegativeFloat = Field(default=0.2, lt=1)
        """How far brightness, contrast and saturation are drawn from 1."""

    params: Params

    def model(self) -> nn.Module:
        classes = self.params.classes
        if classes is None:
            classes = len(ImageFolder(self.params.train).classes)
        return ResidualNet(self.params.width, classes if isinstance(classes, int) else len(classes))

    def train_data(self) -> Dataset[Any]:
        return Pictures(self._encoded(self.params.train), self.params, augment=True)

    def eval_data(self) -> Dataset[Any] | None:
        where = self.params.evaluation
        return None if where is None else Pictures(self._encoded(where), self.params, augment=False)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        images, labels = batch
        logits = model(images)
        total = F.cross_entropy(logits, labels, reduction="sum")
        right = (logits.detach().argmax(1) == labels).sum()
        return lockstep.Loss(total, len(labels), parts={"accuracy": lockstep.Mean(right, len(labels))})

    def identity(self) -> dict[str, object]:
        """What decodes the images."""
        return {"pillow": version("pillow")}

    def example_input(self) -> Tensor:
        return torch.zeros(2, 3, self.params.size, self.params.size)

    def _encoded(self, where: str) -> Dataset[Any]:
        p = self.params
        if isinstance(p.classes, int):
            return Rows(Table(where, {"image": p.image, "label": p.label}))
        return ImageFolder(where, p.classes or ImageFolder(p.train).classes)


class Rows(Dataset[EncodedImage]):
    """Encoded images in rows of a table, which is read by block as it lies."""

    draws_nothing = True

    def __init__(self, table: Table) -> None:
        self.table = table
        self.block_sizes, self.fingerprint = table.block_sizes, table.fingerprint
        self.check_order, self.read_ahead = table.check_order, table.read_ahead

    def __len__(self) -> int:
        return len(self.table)

    def __getitems__(self, ids: Sequence[int]) -> list[EncodedImage]:
        batch = self.table.__getitems__(np.asarray(ids))
        pairs = zip(ids, batch["image"], batch["label"].tolist(), strict=True)
        return [EncodedImage(content, label, f"row {i} of the table") for i, content, label in pairs]


class Pictures(Dataset[tuple[Tensor, int]]):
    """Images (3, S, S) from 0 to 1, each with the number of its class.

    What augments an image is drawn for this image at this step, whoever fetches it.
    """

    def __init__(self, encoded: Any, params: Images.Params, *, augment: bool) -> None:
        self.encoded, self.params, self.augment = encoded, params, augment
        for name in ("block_sizes", "check_order", "read_ahead"):
            if hasattr(encoded, name):
                setattr(self, name, getattr(encoded, name))

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitems__(self, ids: Sequence[int]) -> list[tuple[Tensor, int]]:
        many = getattr(self.encoded, "__getitems__", None)
        every = [self.encoded[i] for i in ids] if many is None else many(ids)
        return [
            (self._picture(one, lockstep.rng(f"augment {i}")), one.label)
            for i, one in zip(ids, every, strict=True)
        ]

    def fingerprint(self) -> Any:
        return self.encoded.fingerprint()

    def _picture(self, encoded: EncodedImage, draw: np.random.Generator) -> Tensor:
        image, p = opened_image(encoded.content, encoded.name), self.params
        share = draw.uniform(p.smallest, 1.0) if self.augment else 1.0
        side = share**0.5 * min(image.size)
        left, top = ((extent - side) * (draw.random() if self.augment else 0.5) for extent in image.size)
        image = image.resize(
            (p.size, p.size), resample=2, box=(left, top, left + side, top + side)
        )  # bilinear
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        if not self.augment:
            return x
        if p.flip and draw.random() < 0.5:
            x = x.flip(2)
        return coloured(x, *draw.uniform(1 - p.colour, 1 + p.colour, 3))


def coloured(x: Tensor, brightness: float, contrast: float, saturation: float) -> Tensor:
    """An image (3, S, S) with other colours: times brightness, then away from its mean, then away from its grey."""
    x = x * brightness
    x = x.mean() + (x - x.mean()) * contrast
    grey = x.mean(0, keepdim=True)
    return (grey + (x - grey) * saturation).clamp(0, 1)


class ResidualNet(nn.Module):
    """Images (B, 3, S, S) to logits: three stages of one block each, twice as many channels at half the size from stage to stage."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stages = nn.Sequential(Block(width, width), Block(width, 2 * width), Block(2 * width, 4 * width))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return logits


class Block(nn.Module):
    """The basic block of He et al. (2015), arXiv 1512.03385."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = (
            nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x))
