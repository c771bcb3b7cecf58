"""Samples of any kind are seen bit for bit: what changes inside an object changes its leaves, and nothing else does."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import pickle
import subprocess
import sys
import threading
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lockstep.data import problems
from lockstep.data.contents import UnreadableError, leaves
from lockstep.data.fingerprint import check_repeats, fingerprint
from tests.raised import raises


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Record:
    x: Any
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


class Named(NamedTuple):
    x: Any
    y: int = 0


Old = namedtuple("Old", "x")


class Bare:
    def __init__(self, x: Any) -> None:
        self.x = x


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class SlotsAndMore(Slots):
    def __init__(self, x: Any) -> None:
        super().__init__(0)
        self.z = x


class Stateful:
    """Shows pickle what matters and keeps its cache to itself."""

    def __init__(self, x: Any) -> None:
        self.x, self.cache = x, object()

    def __getstate__(self) -> Any:
        return {"x": self.x}


class Reduced:
    def __init__(self, x: Any) -> None:
        self._x = x

    def __reduce__(self) -> Any:
        return (Reduced, (self._x,))


class Text(str):
    pass


class Tagged(torch.Tensor):
    """A tensor with an attribute, as boxes with a canvas are."""


class Words(dict[str, Any]):
    pass


class Annotated(list[Any]):
    pass


def tagged(size: int) -> Tagged:
    tensor = torch.zeros(2).as_subclass(Tagged)
    tensor.canvas = size  # type: ignore[attr-defined]
    return tensor


def with_attribute(value: Any, x: int) -> Any:
    value.x = x
    return value


def sparse(value: float) -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 1], [1, 0]], [value, 2.0], (2, 2), check_invariants=True)


def image(shade: int) -> Any:
    from PIL import Image

    return Image.new("L", (3, 2), shade)


def graph(value: int) -> Bare:
    """A cycle: a graph whose store knows its graph, as PyG's do."""
    whole = Bare(None)
    whole.store = Bare(torch.tensor(value))  # type: ignore[attr-defined]
    whole.store.parent = whole  # type: ignore[attr-defined]
    return whole


def generator(seed: int) -> Any:
    return np.random.default_rng(seed)


KINDS: dict[str, Any] = {
    "dataclass": Record,
    "dataclass with slots": Slotted,
    "named tuple": Named,
    "collections.namedtuple": Old,
    "object": Bare,
    "object with slots": Slots,
    "object with slots and a dict": SlotsAndMore,
    "__getstate__": Stateful,
    "__reduce__": Reduced,
    "nested objects": lambda x: Bare({"a": [Slotted((Record(x),))]}),
    "tensor in an object": lambda x: Bare(torch.tensor([1.0, x])),
    "array in an object": lambda x: Bare(np.array([1.0, x])),
    "bytes in an object": lambda x: Bare(bytes([x])),
    "text": str,
    "text of a class": lambda x: Text(str(x)),
    "bytearray": lambda x: bytearray([x]),
    "memoryview": lambda x: memoryview(bytes([0, 9, x, 9]))[::2],
    "set": lambda x: {"a", "b", x},
    "frozenset": lambda x: frozenset({("a", x)}),
    "set of objects": lambda x: {Slotted(x), Slotted("other")},
    "key of a dict": lambda x: {Slotted(x): 1},
    "dict of a class": lambda x: with_attribute(Words(a=1), x),
    "list of a class": lambda x: with_attribute(Annotated([1]), x),
    "tensor of a class": tagged,
    "OrderedDict": lambda x: OrderedDict(a=x),
    "defaultdict": lambda x: defaultdict(list, a=[x]),
    "Counter": lambda x: Counter({"a": x}),
    "UserDict": lambda x: UserDict(a=x),
    "deque": lambda x: deque([1, x]),
    "enum": lambda x: [Colour.RED, Colour.BLUE, Colour.RED][x],
    "IntEnum": lambda x: Level(1 + x % 2),
    "datetime": lambda x: datetime.datetime(2020, 1, 1 + x, tzinfo=datetime.UTC),
    "Decimal": decimal.Decimal,
    "Fraction": lambda x: fractions.Fraction(x, 7),
    "path": lambda x: pathlib.PurePosixPath(f"/a/{x}"),
    "slice": lambda x: slice(0, x),
    "range": range,
    "array of objects": lambda x: np.array([{"a": x}, "b"], object),
    "array with fields": lambda x: np.array([(1, x)], [("a", "i1"), ("b", "f8")]),
    "masked array": lambda x: np.ma.masked_array([1, 2], mask=[x % 2, 0]),
    "datetime64": lambda x: np.datetime64("2020-01-01") + np.timedelta64(x),
    "sparse tensor": sparse,
    "sparse CSR tensor": lambda x: sparse(x).to_sparse_csr(),
    "complex tensor": lambda x: torch.tensor([complex(1, x)]).conj(),
    "bfloat16": lambda x: torch.tensor([x], dtype=torch.bfloat16),
    "packed sequence": lambda x: torch.nn.utils.rnn.pack_sequence([torch.tensor([1.0, x]), torch.ones(1)]),
    "image": image,
    "cycle": graph,
    "numpy generator": generator,
    "namespace": lambda x: types.SimpleNamespace(a=x),
    "partial": lambda x: functools.partial(max, x),
    "class": lambda x: [Bare, Slots, Bare][x],
    "function": lambda x: [image, graph, image][x],
    "bound method": lambda x: Bare(x).__init__,
    "dtype": lambda x: [torch.int8, torch.int16, torch.int8][x],
    "minus zero": lambda x: Bare(-0.0 if x == 1 else 0.0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_shows_what_it_holds(kind: str) -> None:
    """Equal content, equal leaves; the negative control is another content."""
    make = KINDS[kind]
    if kind == "image":
        pytest.importorskip("PIL")
    one, same, other = (
        list(leaves(make(x))) for x in (0 if kind in {"enum", "class", "function", "dtype"} else 2, 2, 1)
    )
    assert one == same
    assert one != other


@pytest.mark.scenario
def test_the_same_object_has_the_same_leaves_in_another_process() -> None:
    """No address and no order of a set gets in, whatever string hashing is seeded with."""
    text = (
        "from tests.unit.data.test_contents import *\n"
        "print([list(leaves(KINDS[kind](2))) for kind in KINDS if kind not in {'image'} and 'CSR' not in kind])"
    )
    root = Path(__file__).parents[3]
    told = {
        subprocess.run(
            [sys.executable, "-c", text],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": f"{root}/platform:{root}", "PATH": ""},
            cwd=root, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(told) == 1
    assert " at 0x" not in told.pop()


def test_what_went_through_pickle_is_the_same() -> None:
    """Loader processes send samples by pickle."""
    for value in (
        graph(3),
        Record(torch.ones(2), {"a": Slotted(3)}),
        deque([1, Bare({3})]),
        OrderedDict(a=Named(1)),
    ):
        assert list(leaves(value)) == list(leaves(pickle.loads(pickle.dumps(value))))


def test_types_count() -> None:
    values = [
        Bare(1),
        Slots(1),
        Record(1),
        Slotted(1),
        Named(1),
        Old(1),
        [1],
        (1,),
        {1},
        frozenset({1}),
        deque([1]),
        {"x": 1},
    ]
    assert len({str(list(leaves(value))) for value in values}) == len(values)


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        (threading.Lock(), "_thread.lock", "cannot pickle"),
        (Bare(lambda: 1), "function", "<lambda> cannot be found by its name"),
        ([iter(int, 1), (i for i in [1])], "generator", "cannot pickle"),
        (functools.reduce(lambda inner, _: [inner], range(500), []), "list", "more than 100 levels deep"),
    ],
)
def test_what_cannot_be_read_is_refused_or_known_by_its_type_alone(
    value: Any, kind: str, reason: str
) -> None:
    with pytest.raises(UnreadableError) as error:
        list(leaves(value))
    assert error.value.kind == kind
    assert reason in error.value.reason
    if kind != "list":
        assert any(kind in text for _, text in leaves(value, opaque=True))


def test_an_object_that_raises_while_it_is_read_is_refused() -> None:
    class Broken:
        def __getstate__(self) -> Any:
            raise KeyError("gone")

    with pytest.raises(UnreadableError, match="gone"):
        list(leaves(Broken()))


# --- what follows for a dataset ---------------------------------------------------------------------------


class Objects(torch.utils.data.Dataset[Any]):
    """Samples that are objects."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return Record(Bare(self.values[index]))


def test_other_data_in_objects_have_another_fingerprint() -> None:
    """A killed run must not go on with them."""
    before = fingerprint(Objects(torch.arange(20.0)), 20, seed=1)
    assert before == fingerprint(Objects(torch.arange(20.0)), 20, seed=1)
    assert before != fingerprint(Objects(torch.arange(20.0) + 1e-6), 20, seed=1)


def test_a_counter_within_an_object_is_seen() -> None:
    count = iter(range(9))
    with raises(problems.FETCHES_DIFFER, location=" in batch[0].x.x"):
        check_repeats(*([Record(Bare(next(count)))] for _ in range(2)))
    check_repeats(*([Record(Bare(7))] for _ in range(2)))


def test_samples_that_cannot_be_looked_into_need_a_fingerprint() -> None:
    class Locked(Objects):
        def __getitem__(self, index: int) -> Any:
            return {"x": self.values[index], "lock": threading.Lock()}

    class Known(Locked):
        def fingerprint(self) -> dict[str, str]:
            return {"version": "3"}

    with raises(problems.SAMPLE_CONTENT, what="sample 0", kind="_thread.lock", dataset="Locked"):
        fingerprint(Locked([1]), 1, seed=1)
    assert fingerprint(Known([1]), 1, seed=1) == {"version": "3"}
    with raises(problems.BATCH_CONTENT, kind="_thread.lock"):
        check_repeats(Locked([1])[0], Locked([1])[0])
    check_repeats(Locked([1])[0], Locked([1])[0], opaque=True)
    with raises(problems.FETCHES_DIFFER, location=" in batch['x']"):
        check_repeats(Locked([1])[0], Locked([2])[0], opaque=True)
