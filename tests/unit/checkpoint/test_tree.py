"""A state comes back as it went: every type, every bit. What cannot is refused, with its place."""

from __future__ import annotations

import json
import math
import pickle
import re
import sys
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.tensor_file import read_tensors, tensor_pieces
from lockstep.checkpoint.tree import DTYPES, pack, plain, sharing
from lockstep.checkpoint.tree_decoder import unpack
from lockstep.parsing import canonical_json, strict_json
from tests.raised import raises
from tests.unit.checkpoint.states import bits, nan, raw, same, state


def through_files(tree: Any) -> Any:
    """The tree by way of the bytes of its two files."""
    packed = pack(tree)
    content = b"".join(bytes(piece) for piece in tensor_pieces(packed.tensors))
    position = 0

    def fill(buffer: memoryview) -> None:
        nonlocal position
        buffer[:] = content[position : position + len(buffer)]
        position += len(buffer)

    return unpack(strict_json(canonical_json(packed.skeleton)), read_tensors(fill, len(content)))


SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.builds(
    lambda dtype, shape, seed: bits(dtype, *shape, seed=seed),
    st.sampled_from(list(DTYPES.values())),
    SHAPES,
    st.integers(0, 99),
)
FLOATS = st.one_of(st.floats(), st.builds(nan, st.integers(1, 2**51 - 1)))
KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    FLOATS,
    st.text(),
    st.sampled_from(["$tensor", "$", "a/b", "__metadata__"]),
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), FLOATS, st.text(), TENSORS)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.scenario
@settings(max_examples=300)
@given(TREES)
def test_a_tree_comes_back_to_the_bit(tree: Any) -> None:
    assert same(through_files(tree), tree)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_type_of_number_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    tree = [bits(dtype, 64, seed=1), bits(dtype, seed=2), bits(dtype, 0, 3)]
    assert same(through_files(tree), tree)


def test_a_real_optimizer_comes_back_and_takes_the_same_step() -> None:
    """Also its whole numbers as keys, which JSON alone would turn into text."""
    twins = []
    for _ in range(2):
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        twins.append((model, optimizer))
    (model, optimizer), (other, restored) = twins
    found = through_files(optimizer.state_dict())
    assert same(found, optimizer.state_dict())
    restored.load_state_dict(found)
    optimizer.step()
    restored.step()
    assert same(list(map(torch.detach, model.parameters())), list(map(torch.detach, other.parameters())))


def test_floats_and_whole_numbers_are_exact() -> None:
    tree = [
        0.1,
        -0.0,
        1e-323,
        1e16,
        1.0,
        math.inf,
        -math.inf,
        nan(12345),
        -nan(1),
        2**53 + 1,
        -(2**63),
        2**63,
        10**5000,
    ]
    limit = sys.get_int_max_str_digits()
    assert same(through_files(tree), tree)
    assert sys.get_int_max_str_digits() == limit


def test_tied_tensors_are_stored_once_and_tied_again() -> None:
    weight = bits(torch.float32, 3, 4)
    tree = {"embed": weight, "head": torch.nn.Parameter(weight), "turned": weight.t(), "part": weight[1:]}
    packed = pack(tree)
    assert list(packed.tensors) == ["embed"]
    found = through_files(tree)
    assert found["embed"] is found["head"]
    assert found["turned"].data_ptr() == found["embed"].data_ptr()
    assert torch.equal(found["turned"].view(torch.int32), weight.t().view(torch.int32))
    assert same(found["part"], weight[1:])
    assert found["part"].data_ptr() == found["embed"][1:].data_ptr()


def overlapping() -> dict[str, Any]:
    """Tensors that share memory and are not the same, each kind by itself."""
    flat, image = bits(torch.float32, 10, seed=1), bits(torch.float32, 4, 6, seed=2)
    apart, number = bits(torch.int64, 3, 5, seed=3), torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    return {
        "views of a flat one": [flat[:4].view(2, 2), flat, flat[4:]],
        "two that overlap": [image.view(-1)[:9], image.view(-1)[7:15]],
        "another shape": [image, image.view(6, 4)],
        "another type": [flat, flat.view(torch.uint8)[3:9]],
        "the same with gaps": [apart[:, ::2], apart[:, ::2]],
        "one and its values": [number, number.conj(), number.conj().imag],
        "one that repeats itself": [torch.ones(2, 1).expand(2, 4)],
        "beside others": [torch.ones(2), flat[:3], torch.zeros(1), flat[2:], 5],
    }


def values(tensors: list[Any]) -> bytes:
    return b"".join(raw(one.resolve_conj().resolve_neg()) for one in tensors if isinstance(one, torch.Tensor))


def writes(tensors: list[Any]) -> list[list[int]]:
    """Which bytes of all tensors a write into each element of each one changes: what they share."""
    found = []
    for one in tensors:
        for place in np.ndindex(*one.shape) if isinstance(one, torch.Tensor) else ():
            before, kept = values(tensors), one[place].clone()
            one[place] = 0 if kept != 0 else 1
            after = values(tensors)
            found.append([i for i in range(len(before)) if before[i] != after[i]])
            one[place] = kept
    return found


@pytest.mark.parametrize("name", overlapping())
def test_tensors_that_overlap_do_so_again(name: str) -> None:
    tensors = overlapping()[name]
    found = through_files(tensors)
    assert values(found) == values(tensors)
    assert writes(found) == writes(tensors)
    assert writes([one.contiguous().clone() for one in tensors if isinstance(one, torch.Tensor)]) != writes(
        tensors
    )  # a control


def test_shared_memory_is_stored_once_under_the_name_of_the_whole() -> None:
    flat = bits(torch.float32, 10)
    packed = pack({"momentum": [flat[:4], flat[4:]], "flat": flat, "own": torch.ones(2)})
    assert {name: tuple(one.shape) for name, one in packed.tensors.items()} == {"flat": (10,), "own": (2,)}
    assert packed.tensors["flat"].data_ptr() == flat.data_ptr()  # type: ignore[union-attr]
    assert packed.skeleton["momentum"][1] == {
        "$view": "flat", "dtype": "F32", "at": 16, "shape": [6], "strides": [1]
    }  # fmt: skip


def test_what_does_not_overlap_is_stored_as_it_always_was() -> None:
    """Neighbours in one memory too: only what a write into the one would change in the other."""
    flat, batch = bits(torch.float32, 10), bits(torch.float32, 4, 3)
    packed = pack({"a": flat[:4], "b": flat[4:], "c": batch[:, 1], "d": [[], []]})
    words = {name: {"$tensor": name} for name in "abc"}
    assert packed.skeleton == {**words, "d": [[], []]} and list(packed.tensors) == list(words)


def test_memory_of_which_no_tensor_has_all_is_refused() -> None:
    numbers = np.arange(10)
    with raises(
        problems.UNSTORABLE,
        where="job/first",
        got=re.compile("a tensor in the memory of job/second, but no view of the"),
    ):
        pack({"first": torch.from_numpy(numbers[:6]), "second": torch.from_numpy(numbers[4:])}, "job")


def test_a_list_or_mapping_in_several_places_is_one_again() -> None:
    queue, names = [torch.ones(2)], {"a": 1}
    found = through_files({"x": queue, "y": (names, [queue]), 3: names, "other": [torch.ones(2)]})
    assert found["x"] is found["y"][1][0] and found["y"][0] is found[3]
    assert same(found["other"], found["x"]) and found["other"] is not found["x"]


def test_plain_values_stay_in_their_places() -> None:
    """Of a manifest every value is read where it stands."""
    betas = [0.9, 0.999]
    assert plain([betas, betas], "fields") == [betas, betas]


def test_what_shares_memory_is_told_by_its_places() -> None:
    flat, tied = torch.ones(4), torch.ones(2)
    found = sharing({"a": flat[2:], "b": {"c": flat}, "d": torch.ones(4), "e": [tied, tied]}, "job")
    assert found == {
        frozenset({("job/a", 8), ("job/b/c", 0)}),
        frozenset({("job/e/0", 0), ("job/e/1", 0)}),
    }


def test_empty_tensors_are_not_taken_for_tied() -> None:
    found = through_files([torch.empty(0), torch.empty(0)])
    assert found[0] is not found[1]


def test_tensors_in_another_order_of_dimensions_keep_it() -> None:
    image = bits(torch.float32, 2, 3, 4, 5)
    tree = {
        "last": image.to(memory_format=torch.channels_last),
        "turned": image.permute(3, 1, 0, 2),
        "apart": image[:, ::2],
        "wide": image[:1].expand(3, 3, 4, 5),
    }
    found = through_files(tree)
    assert same([found["last"], found["turned"]], [tree["last"], tree["turned"]])
    for name in ("apart", "wide"):  # they overlap with another
        assert same(found[name], tree[name])
    alone = through_files(tree["apart"])
    assert same(alone, tree["apart"].contiguous())  # its gaps are not kept


@pytest.mark.parametrize(
    "tensor",
    [
        bits(torch.float32, 1, 100).t(),
        bits(torch.float32, 100, 1).t(),
        bits(torch.float32, 100, 1),
        bits(torch.float32, 4, 1, 3, 3).to(memory_format=torch.channels_last),
        bits(torch.float32, 3, 4, 1, 1).to(memory_format=torch.channels_last),
        bits(torch.float32, 1, 1, 4, 1).to(memory_format=torch.channels_last),
        bits(torch.float32, 1, 8, 1).permute(2, 1, 0),
        bits(torch.float32, 1),
    ],
)
def test_dimensions_of_one_element_keep_their_strides(tensor: torch.Tensor) -> None:
    """A library goes by them, so a resumed optimizer would multiply matrices to other bits."""
    (found,) = through_files([tensor])
    assert same(found, tensor)
    assert found.stride() == tensor.stride()


def test_packing_copies_nothing_of_a_dense_tensor() -> None:
    weight = bits(torch.float32, 2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert pack([weight]).tensors["0"].data_ptr() == weight.data_ptr()


def test_views_that_negate_or_conjugate_come_back_as_their_values() -> None:
    number = torch.tensor([1 + 2j], dtype=torch.complex64)
    found = through_files([number.conj(), number.conj().imag])
    assert found[0].tolist() == [1 - 2j]
    assert found[1].tolist() == [-2.0]


def test_loaded_tensors_are_aligned_and_want_no_gradient() -> None:
    found = through_files([torch.nn.Parameter(torch.ones(n)) for n in (1, 3, 5)])
    assert all(tensor.data_ptr() % 32 == 0 and not tensor.requires_grad for tensor in found)


def test_a_tree_that_is_an_ordered_mapping_is_a_mapping() -> None:
    assert type(found := through_files(OrderedDict(b=1, a=2))) is dict
    assert same(found, {"b": 1, "a": 2})


def test_an_ordered_mapping_within_a_tree_stays_one() -> None:
    """A job that keeps the least recently used takes its first item, which a plain mapping does not give."""
    recent = OrderedDict({"b": torch.ones(2), 1: [2.5]})
    found = through_files({"recent": recent, "again": recent, "rest": [[], {"x": 1}, recent]})
    assert type(found["recent"]) is OrderedDict
    assert found["recent"] is found["again"] is found["rest"][2]
    assert found["rest"][:2] == [[], {"x": 1}]
    assert found["recent"].popitem(last=False)[0] == "b"
    assert found["recent"] == {1: [2.5]}


NUMBERS = [
    *(kind(3) for kind in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64)),
    np.uint64(2**64 - 1),
    *(kind(0.1) for kind in (np.float16, np.float32, np.float64, np.complex64, np.complex128)),
    np.bool_(True),
    np.float64("nan"),
    np.float32("-inf"),
    np.float64(-0.0),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number!r}")
def test_a_number_of_numpy_keeps_its_type(number: Any) -> None:
    """A result of `np.mean` in the state of a job: as a float it would go on in other arithmetic."""
    (back,) = through_files([number])
    assert type(back) is type(number)
    assert back.tobytes() == number.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint32),
        np.arange(12.0).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(6)[::-1],
        np.arange(12)[::3],
        np.broadcast_to(np.float32(2), (3,)),
        np.array(2.5),
        np.zeros((0, 3)),
        np.array([True, False]),
    ],
    ids=str,
)
def test_an_array_of_numpy_comes_back_to_the_bit(array: Any) -> None:
    (back,) = through_files([array])
    assert (type(back), back.dtype, back.shape) == (np.ndarray, array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


def test_the_generator_of_numpy_goes_on_where_it_was() -> None:
    generator = np.random.RandomState(5)
    generator.normal()
    saved = generator.get_state()
    expected = generator.normal(size=3)
    other = np.random.RandomState(6)
    other.set_state(through_files(saved))
    assert other.normal(size=3).tobytes() == expected.tobytes()


def test_arrays_and_tensors_that_share_memory_share_it_again() -> None:
    row = np.arange(6.0)
    back = through_files({"row": row, "again": row, "tail": row[3:], "tensor": torch.from_numpy(row)})
    back["row"][4] = -1.0
    assert back["again"][4] == back["tail"][1] == back["tensor"][4] == -1.0


class Subclass(torch.Tensor):
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.datetime64("2026-01-01"), "job/a/0 is a numpy.datetime64"),
        (np.longdouble(1), "a numpy.longdouble"),
        (np.array(["a"]), "an array of <U1"),
        (np.array([{}]), "an array of object"),
        (np.zeros(2).astype(">f8"), "an array of >f8"),
        (np.zeros(2, np.complex128), "a tensor of torch.complex128"),
        (np.ma.masked_array([1.0], [True]), "a numpy.ma.MaskedArray"),
        ({1, 2}, "a builtins.set"),
        (b"", "a builtins.bytes"),
        (namedtuple("Pair", "a")(1), "Pair"),
        (torch.Size([1]), "a torch.Size"),
        (torch.eye(2).to_sparse(), "a tensor of torch.float32, torch.sparse_coo on cpu"),
        (torch.empty(2, device="meta"), "on meta"),
        (torch.zeros(2, dtype=torch.complex128), "a tensor of torch.complex128"),
        (torch.zeros(2).as_subclass(Subclass), "Subclass"),
        ({(1, 2): 3}, "a mapping with a tuple as a key"),
        (CYCLE, "nested too deep, or holds itself"),
        (print, "builtin_function_or_method"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_with_its_place(value: Any, told: str) -> None:
    with raises(problems.UNSTORABLE, where=re.compile("^job/a/0")) as raised:
        pack({"a": [value]}, "job")
    assert told in raised.value.evidence
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$tensor": "missing"},
        {"$tensor": "x", "order": [0, 0]},
        {"$tensor": "x", "order": [[]]},
        {"$tensor": ["x"]},
        {"$view": "x", "dtype": "F32", "at": 4, "shape": [6], "strides": [1]},
        {"$view": "x", "dtype": "F32", "at": -4, "shape": [1], "strides": [1]},
        {"$view": "x", "dtype": "F32", "at": 2, "shape": [1], "strides": [1]},
        {"$view": "x", "dtype": "F32", "at": 0, "shape": [0], "strides": [1]},
        {"$view": "x", "dtype": "F32", "at": 0, "shape": [2], "strides": [1, 1]},
        {"$view": "x", "dtype": "F33", "at": 0, "shape": [1], "strides": [1]},
        {"$view": "x"},
        [{"$tensor": "x"}, {"$same": 0}],
        [[], {"$same": -1}, {"$tensor": "x"}],
        {"$object": "os.system"},
        {"a": 1, "$tuple": []},
        {"$tuple": [], "a": 1},
        {"$tuple": 3},
        {"$map": [[1, 2, 3]]},
        {"$map": [[[], 2]]},
        {"$ordered": [[1, 2, 3]]},
        {"$ordered": [], "a": 1},
        {"$float": "00"},
        {"$float": 3},
        {"$int": "many"},
        {"$number": "O", "bytes": "00" * 8},
        {"$number": "<f4", "bytes": "00"},
        {"$number": "<f4", "bytes": "00" * 8},
        {"$number": "<f4"},
        {"$number": "<f4", "bytes": "00" * 4, "more": 1},
        {"$array": 3},
        {"$array": {"$tensor": "missing"}},
        {"$array": {"$tensor": "x"}, "more": 1},
        [],
        [{"$tensor": "x"}] + [[]] * 3 + [{"$word": 1}],
    ],
)
def test_a_skeleton_that_no_tree_left_is_refused(skeleton: Any) -> None:
    with pytest.raises(BadCheckpointError):
        unpack(skeleton, {"x": torch.ones(2, 3)})


def test_a_skeleton_without_end_is_refused() -> None:
    """Whatever else the process has imported: some of it raises the limit of Python's own."""
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(50_000)
        with raises(problems.UNREADABLE, got="it is nested too deep"):
            unpack(deep, {})
    finally:
        sys.setrecursionlimit(limit)
    with pytest.raises(ValueError, match="too deep"):
        strict_json(b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"a": 1, "a": 2}', b"NaN", b"\xff\xfe", pickle.dumps({"a": 1}), b"1" * 5000]
)
def test_what_is_no_strict_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        strict_json(text)


def test_the_skeleton_of_a_state_is_readable() -> None:
    """A person can see what a checkpoint holds, and names in the tensor file are those of the model."""
    packed = pack(state(3)["optimizer"])
    assert json.loads(canonical_json(packed.skeleton))["param_groups"][0]["betas"] == {"$tuple": [0.9, 0.999]}
    assert "state/0/exp_avg" in packed.tensors
    assert set(pack(state(3)["model"]).tensors) >= {"conv.weight", "embed.weight"}
