"""A generator of the job's own that fetches draw on from is found by its state; one that is seeded anew for each sample is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import lockstep
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.generators import OwnGenerators, of_training
from tests.raised import raises

KEYS = ([0, 1], [2, 3])
MODULES = np.random.default_rng(5)


class Data(Dataset[float]):
    """Samples that a function of the dataset and the index gives."""

    shared = random.Random(4)

    def __init__(self, sample: Callable[[Any, int], Any], generator: Any = None) -> None:
        self.sample, self.rng = sample, generator
        self.kept: dict[int, Any] = {}
        self.several = {"first": [random.Random(1)], "second": (np.random.default_rng(2),)}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.sample(self, index)


class Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)


def names(data: Any, job: Any = None) -> list[str]:
    """The generators that fetches draw on from, as the rehearsal looks for them."""
    own = of_training(job or lockstep.Job(None), data)
    for ids in (*KEYS, KEYS[0]):
        fetched(data, ids)
        own.look()
    places = own.gone_on()
    if places:
        fetched(data, KEYS[0])
        own.look()
    return [place for place in own.gone_on() if place in places]


def fetched(data: Any, ids: list[int]) -> None:
    for index in ids:
        data[index]


def draw(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator)
    return generator.random()


@pytest.mark.parametrize(
    "made",
    [
        lambda: np.random.default_rng(0),
        lambda: np.random.Generator(np.random.MT19937(0)),
        lambda: np.random.RandomState(0),
        lambda: np.random.RandomState(np.random.PCG64(0)),
        lambda: random.Random(0),
        lambda: torch.Generator().manual_seed(0),
    ],
)
def test_a_generator_of_any_kind_that_goes_on_is_named(made: Callable[[], Any]) -> None:
    """Whether or not its draw shows in the samples, as that of a rare augmentation does not."""
    assert names(Data(lambda data, index: draw(data.rng) < 0, made())) == ["train_data.rng"]
    assert names(Data(lambda data, index: None, made())) == []


def closed_over() -> Callable[[Any, int], Any]:
    own = np.random.default_rng(0)
    return lambda data, index: own.random()


def by_default(data: Any, index: int, own: random.Random = random.Random(6)) -> Any:  # noqa: B008 - that is the mistake
    return own.random()


PLACES = {
    "train_data.several['first'][0]": Data(lambda data, index: draw(data.several["first"][0])),
    "train_data.several['second'][0]": Data(lambda data, index: draw(data.several["second"][0])),
    "train_data.rng.rng": Data(lambda data, index: draw(data.rng.rng), Slotted()),
    "train_data.sample.own": Data(closed_over()),
    "train_data.sample[0]": Data(by_default),
    "train_data.sample": Data(partial(lambda own, data, index: draw(own), random.Random(7))),
    "class Data.shared": Data(lambda data, index: draw(data.shared)),
    f"module {__name__}.MODULES": Data(lambda data, index: draw(MODULES)),
    "train_data.dataset.rng": Subset(Data(lambda data, index: draw(data.rng), random.Random(8)), range(8)),
    "train_data.datasets[0].rng": ConcatDataset([Data(lambda data, index: draw(data.rng), random.Random(9))]),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_wherever_the_data_hold_it(place: str) -> None:
    assert names(PLACES[place]) == [place]


def seeded(data: Any, index: int) -> Any:
    data.rng.seed(index)
    return data.rng.random()


def kept(data: Any, index: int) -> Any:
    """A cache of what is read, in which two samples have room."""
    if index not in data.kept:
        data.kept[index] = seeded(data, index)
        if len(data.kept) > 2:
            del data.kept[next(iter(data.kept))]
    return data.kept[index]


def made_anew(data: Any, index: int) -> Any:
    data.rng = np.random.default_rng(index)
    return data.rng.random()


def from_the_default(data: Any, index: int) -> Any:
    """From NumPy's own, which is seeded for each micro-batch."""
    data.rng = np.random.mtrand._rand
    if index == 0:
        np.random.seed(1)
    return data.rng.random()


@pytest.mark.parametrize("sample", [seeded, kept, made_anew, from_the_default])
def test_a_generator_that_the_sample_seeds_passes(sample: Callable[[Any, int], Any]) -> None:
    assert names(Data(sample, random.Random(0))) == []


def test_one_of_the_operating_system_has_no_state() -> None:
    assert names(Data(lambda data, index: data.rng.random(), random.SystemRandom())) == []


def test_the_line_names_it_and_a_cache_that_fills_later_is_let_go() -> None:
    own = OwnGenerators({"eval_data": (data := Data(seeded, random.Random(0)))})
    for index in (1, 2, 3):
        data[index]
        own.look()
    assert own.gone_on() == ["eval_data.rng"]
    data[2]
    own.look()
    own.refuse(["eval_data.rng"])
    data[5]
    own.look()
    with raises(problems.DATA_GENERATOR, name="eval_data.rng"):
        own.refuse(["eval_data.rng"])
