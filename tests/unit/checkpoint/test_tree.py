"""A state comes back as it went: every type, every bit. What cannot is refused, with its place."""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.errors import BadCheckpointError
from lockstep.checkpoint.plain_json import as_text, parsed
from lockstep.checkpoint.skeleton import unpack
from lockstep.checkpoint.tensor_file import read_tensors, tensor_pieces
from lockstep.checkpoint.tree import DTYPES, pack
from lockstep.errors import JobError
from tests.unit.checkpoint.states import bits, nan, same, state


def through_files(tree: Any) -> Any:
    """The tree by way of the bytes of its two files."""
    packed = pack(tree)
    content = b"".join(bytes(piece) for piece in tensor_pieces(packed.tensors))
    position = 0

    def fill(buffer: memoryview) -> None:
        nonlocal position
        buffer[:] = content[position : position + len(buffer)]
        position += len(buffer)

    return unpack(parsed(as_text(packed.skeleton)), read_tensors(fill, len(content)))


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


@settings(max_examples=300, deadline=None)
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
    assert list(packed.tensors) == ["embed", "part"]
    found = through_files(tree)
    assert found["embed"] is found["head"]
    assert found["turned"].data_ptr() == found["embed"].data_ptr()
    assert torch.equal(found["turned"].view(torch.int32), weight.t().view(torch.int32))
    assert same(found["part"], weight[1:])


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
    for name in ("apart", "wide"):  # gaps and repetitions are not kept, their values are
        assert same(found[name], tree[name].contiguous())


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


def test_an_ordered_mapping_is_a_mapping() -> None:
    assert same(through_files(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


class Subclass(torch.Tensor):
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.float64(1.0), "job/a/0 is a numpy.float64"),
        (np.zeros(2), "a numpy.ndarray"),
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
    with pytest.raises(JobError) as raised:
        pack({"a": [value]}, "job")
    line = str(raised.value)
    assert told in line and line.startswith("checkpoint: job/a/0") and "wanted tensors, numbers" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$tensor": "missing"},
        {"$tensor": "x", "order": [0, 0]},
        {"$tensor": "x", "order": [[]]},
        {"$tensor": ["x"]},
        {"$object": "os.system"},
        {"a": 1, "$tuple": []},
        {"$tuple": [], "a": 1},
        {"$tuple": 3},
        {"$map": [[1, 2, 3]]},
        {"$map": [[[], 2]]},
        {"$float": "00"},
        {"$float": 3},
        {"$int": "many"},
        [],
        [{"$tensor": "x"}] + [[]] * 3 + [{"$word": 1}],
    ],
)
def test_a_skeleton_that_no_tree_left_is_refused(skeleton: Any) -> None:
    with pytest.raises(BadCheckpointError):
        unpack(skeleton, {"x": torch.ones(2, 3)})


def test_a_skeleton_without_end_is_refused() -> None:
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(BadCheckpointError, match="too deep"):
        unpack(deep, {})
    with pytest.raises(ValueError, match="too deep"):
        parsed(b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"a": 1, "a": 2}', b"NaN", b"\xff\xfe", pickle.dumps({"a": 1}), b"1" * 5000]
)
def test_what_is_no_strict_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parsed(text)


def test_the_skeleton_of_a_state_is_readable() -> None:
    """A person can see what a checkpoint holds, and names in the tensor file are those of the model."""
    packed = pack(state(3)["optimizer"])
    assert json.loads(as_text(packed.skeleton))["param_groups"][0]["betas"] == {"$tuple": [0.9, 0.999]}
    assert "state/0/exp_avg" in packed.tensors
    assert set(pack(state(3)["model"]).tensors) >= {"conv.weight", "embed.weight"}
