"""The tree of a value tells every two values apart, and is read back as the value that it is of."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.job.typed_tree import Opaque, decoded, digest, encoded, text

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True, width=64),
    st.binary(max_size=8).map(
        lambda bits: struct.unpack(">d", bits.rjust(8, b"\x7f"))[0]
    ),  # NaN of any payload
    st.text(st.characters(exclude_categories=())),  # with halves of surrogate pairs
    st.sampled_from(["$", "$tuple", "$mapping", "$float", "a.b", ""]),
    st.binary(),
)
KEYS = st.one_of(
    st.text(max_size=3), st.sampled_from(["$set", "$int", "a", "b", "a.b"]), st.integers(), st.booleans()
)
FIXED = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.binary(max_size=3))
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.frozensets(FIXED, max_size=4),
        st.sets(FIXED, max_size=4),
        st.builds(Opaque, st.sampled_from(["job.Kind", "sha256"]), inner),
    ),
    max_leaves=12,
)


def exactly(value: Any) -> Any:
    """A form that `==` compares by kind, order and bits, made in another way than trees are."""
    kind = type(value).__name__
    if isinstance(value, float):
        return kind, struct.pack(">d", value)
    if isinstance(value, Opaque):
        return kind, value.kind, exactly(value.content)
    if isinstance(value, list | tuple):
        return kind, [exactly(inner) for inner in value]
    if isinstance(value, dict):
        return kind, [(exactly(key), exactly(inner)) for key, inner in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(exactly, value)))
    return kind, value


@given(VALUES)
@example(float("nan"))
@example([0.0, -0.0, math.inf, -math.inf, 1e16, 5e-324])
@example({"b": 1, "a": 2})
@example({"$tuple": [1]})
@example(10**700)
def test_a_tree_is_read_back_as_its_value(value: Any) -> None:
    """From the text that a record has: so no two values have one tree."""
    tree = encoded(value)
    assert exactly(decoded(tree)) == exactly(value)
    assert exactly(decoded(json.loads(text(tree)))) == exactly(value)


@given(VALUES, VALUES)
@example(1, True)
@example(1, 1.0)
@example((1,), [1])
@example(b"a", "a")
@example({"a.b": 5}, {"a": {"b": 5}})
@example({"a": 1, "b": 2}, {"b": 2, "a": 1})
@example(Opaque("job.Pair", [1]), {"$job.Pair": [1]})
def test_two_values_have_one_digest_only_if_they_are_the_same(one: Any, other: Any) -> None:
    assert (digest(encoded(one)) == digest(encoded(other))) == (exactly(one) == exactly(other))


@given(VALUES)
def test_whoever_sorts_the_names_of_a_record_changes_nothing(value: Any) -> None:
    tree = json.loads(text({"value": encoded(value)}))
    assert digest(json.loads(json.dumps(tree, sort_keys=True))) == digest({"value": encoded(value)})


def test_a_kind_that_is_not_known_is_told_by_its_caller_or_refused() -> None:
    with pytest.raises(TypeError, match=r"^a builtins\.complex has no tree$"):
        encoded({"a": [1j]})
    with pytest.raises(ValueError, match=r"^'tuple' is a kind that has a form of its own$"):
        encoded(Opaque("tuple", [1]))
    assert encoded([1j], lambda value: Opaque("complex", str(value))) == [{"$complex": "1j"}]
