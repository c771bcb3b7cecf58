"""Ids of samples as a spec writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SpecError
from lockstep.spec.id_ranges import described, normal, parse, written
from lockstep.spec.loading import load_spec


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ids_are_read_as_they_were_written(ids: set[int]) -> None:
    text = written(ids)
    assert {i for one in parse(text) for i in one} == ids
    assert normal(text) == text


@pytest.mark.parametrize(
    ("text", "wanted"), [("5", "5"), ("9, 3-4,5", "3-5,9"), ("7,7", "7"), ("1-9,2-3", "1-9"), ("0,1", "0-1")]
)
def test_one_set_of_ids_has_one_text(text: str, wanted: str) -> None:
    assert normal(text) == wanted


def test_an_identity_has_their_number_and_digest() -> None:
    assert described("3-5,9").startswith("4 samples, sha256 ")
    assert described("3-5,9") != described("3-5,8")


@pytest.mark.parametrize("text", ["", "a", "3,", "-1", "1.5", "3-", "5-3"])
def test_what_is_no_list_of_ids_is_refused_with_its_field(text: str) -> None:
    with pytest.raises(SpecError, match=r"^data\.without: "):
        load_spec({"job": {"use": "any:Job"}, "data": {"without": text}})


def test_one_number_may_be_a_number() -> None:
    spec = load_spec({"job": {"use": "any:Job"}}, ["data.without=17"])
    assert spec.data.without == "17"
    assert load_spec({"job": {"use": "any:Job"}}).data.without is None
