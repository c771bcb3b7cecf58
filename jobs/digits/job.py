"""Handwritten digits: a small convolutional net on scikit-learn's 1797 images of 8×8 pixels."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep

CLASSES = 10

BRIGHTEST = 16.0
"""The data set's largest pixel value."""

HELD_OUT = 5
"""Of each class, every fifth image is held out."""


class Digits(lockstep.Job):
    """Tells which digit an image shows."""

    class Params(lockstep.Params):
        width: PositiveInt = 32
        """Channels at full resolution; twice as many at half resolution."""
        dropout: float = Field(default=0.2, ge=0, lt=1)
        augment: bool = True
        """Vary the training images: shift, contrast, noise."""

    params: Params

    def model(self) -> nn.Module:
        return ConvNet(self.params.width, self.params.dropout)

    def train_data(self) -> Dataset[tuple[Tensor, int]]:
        images, labels = digits(held_out=False)
        return DigitImages(images, labels, augment=self.params.augment)

    def eval_data(self) -> Dataset[tuple[Tensor, int]]:
        images, labels = digits(held_out=True)
        return DigitImages(images, labels, augment=False)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
        images, labels = batch
        logits = model(images)
        correct = (logits.argmax(dim=1) == labels).sum()
        return lockstep.Loss(
            total=F.cross_entropy(logits, labels, reduction="sum"),
            weight=len(labels),
            parts={"accuracy": lockstep.Mean(correct, len(labels))},
        )

    def example_input(self) -> tuple[Tensor]:
        images, _ = digits(held_out=True)
        return (images[:2],)


class ConvNet(nn.Module):
    """Two convolutions at 8×8, two at 4×4, a linear classifier: images (B, 1, 8, 8) to logits (B, 10)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            convolution(1, width),
            convolution(width, width),
            nn.MaxPool2d(2),
            convolution(width, 2 * width),
            convolution(2 * width, 2 * width),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images).mean(dim=(2, 3))
        logits: Tensor = self.classifier(self.dropout(features))
        return logits


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    """A 3×3 convolution that keeps the size; BatchNorm's shift takes the place of its bias."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


class DigitImages(Dataset[tuple[Tensor, int]]):
    """Images (1, 8, 8) of ink between 0 and 1, each with its digit."""

    def __init__(self, images: Tensor, labels: Tensor, *, augment: bool) -> None:
        self.images = images
        self.labels = labels.tolist()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        return varied(image) if self.augment else image, self.labels[index]


def varied(image: Tensor) -> Tensor:
    """The image (1, 8, 8) moved by up to a pixel, with other contrast and some noise.

    Any default generator will do: python's, numpy's and torch's are seeded before each micro-batch is fetched.
    """
    down, right = random.randint(-1, 1), random.randint(-1, 1)
    moved = F.pad(image, (1, 1, 1, 1))[:, 1 - down : 9 - down, 1 - right : 9 - right]
    contrast = torch.empty(()).uniform_(0.8, 1.2)
    noise = np.random.normal(scale=0.05, size=image.shape)
    return moved * contrast + torch.from_numpy(noise).float()


def digits(*, held_out: bool) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 8, 8) and labels (N) of one part of the data."""
    from sklearn.datasets import (
        load_digits,  # takes seconds, which only a process that reads the data waits for
    )

    return part(*load_digits(return_X_y=True), held_out=held_out)


def part(pixels: Any, labels: Any, *, held_out: bool) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 8, 8) and labels (N), split by position in each class, of pixels (M, 64) and labels (M)."""
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / BRIGHTEST
    nth_of_class = np.zeros_like(labels)
    for label in range(CLASSES):
        nth_of_class[labels == label] = np.arange((labels == label).sum())
    chosen = torch.from_numpy((nth_of_class % HELD_OUT == 0) == held_out)
    return images[chosen], torch.from_numpy(labels)[chosen]
