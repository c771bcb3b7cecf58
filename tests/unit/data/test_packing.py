"""Packing: every token once and in order, with its document and its place, whichever rows are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data import Mixture, Packed, problems
from lockstep.data.fingerprint import fingerprint
from lockstep.errors import JobError, Problem
from tests.raised import raises

DOCUMENTS = st.lists(st.lists(st.integers(1, 99), max_size=12), max_size=8)


@given(
    documents=DOCUMENTS,
    length=st.integers(1, 9),
    end=st.sampled_from([None, 0]),
    pad=st.sampled_from([None, 7]),
)
def test_rows_are_the_tokens_one_after_another(
    documents: list[list[int]], length: int, end: int | None, pad: int | None
) -> None:
    data = Packed([torch.tensor(one, dtype=torch.long) for one in documents], length, end=end, pad=pad)  # type: ignore[arg-type]
    stream = [token for one in documents for token in (*one, *([] if end is None else [end]))]
    assert data.tokens == len(stream)
    found = [token for i in range(len(data)) for token in data[i]["tokens"].tolist()]
    if pad is None:
        assert found == stream[: len(stream) // length * length]
    else:
        assert found == stream + [pad] * (-len(stream) % length)


@given(documents=DOCUMENTS, length=st.integers(1, 9))
def test_documents_and_positions_say_where_a_token_is_from(documents: list[list[int]], length: int) -> None:
    data = Packed(documents, length, end=0, pad=0)  # type: ignore[arg-type]
    for i in range(len(data)):
        row, wanted = data[i], []
        for number, piece in enumerate(data.pieces(i)):
            whole = [*documents[piece.document], 0]
            for place, token in enumerate(whole[piece.start : piece.stop]):
                wanted.append((token, number, place))
        wanted += [(0, -1, 0)] * (length - len(wanted))
        assert (
            list(zip(*(row[name].tolist() for name in ("tokens", "documents", "positions")), strict=True))
            == wanted
        )


def test_a_document_goes_on_in_the_next_row() -> None:
    data = Packed([[1, 2, 3], [4, 5, 6, 7, 8]], 4, end=0)  # type: ignore[arg-type]
    assert [data[i]["tokens"].tolist() for i in range(len(data))] == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert data[0]["positions"].tolist() == [0, 1, 2, 3]
    assert data.pieces(1) == [(1, 0, 4)]
    assert data.tokens == 10


def test_lengths_that_are_given_save_reading() -> None:
    class Read(list[list[int]]):
        count = 0

        def __getitem__(self, index: Any) -> Any:
            self.count += 1
            return super().__getitem__(index)

    documents = Read([[1, 2], [3], [4, 5, 6]])
    data = Packed(documents, 2, lengths=[2, 1, 3])  # type: ignore[arg-type]
    assert (documents.count, len(data)) == (0, 3)
    assert data[1]["tokens"].tolist() == [3, 4]
    assert documents.count == 2
    with raises(problems.DOCUMENT_LENGTH, document=1, got=1, wanted=2):
        Packed(documents, 2, lengths=[2, 2, 3])[1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "problem", "facts"),
    [
        (lambda: Packed([[1]], 0), problems.PACKED_LENGTH, {"got": 0}),  # type: ignore[arg-type]
        (
            lambda: Packed([[1]], 2, lengths=[1, 2]),
            problems.PACKED_LENGTHS,
            {"got": 2, "wanted": 1},
        ),  # type: ignore[arg-type]
        (
            lambda: Packed([[1.5]], 2),
            problems.DOCUMENT_KIND,
            {"document": 0, "dtype": "torch.float32", "shape": (1,)},
        ),  # type: ignore[arg-type]
        (lambda: Packed([[[1]]], 2), problems.DOCUMENT_KIND, {"dtype": "torch.int64", "shape": (1, 1)}),  # type: ignore[arg-type]
        (lambda: Packed(iter([[1]]), 2), problems.PACKED_SOURCE, {"got": "list_iterator"}),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_packed_is_refused(
    make: Any, problem: Problem[JobError], facts: dict[str, Any]
) -> None:
    with raises(problem, **facts):
        make()


def test_what_is_packed_and_how_is_in_the_fingerprint() -> None:
    made = [
        Packed([[1, 2], [3]], 2),  # type: ignore[arg-type]
        Packed([[1, 2], [4]], 2),  # type: ignore[arg-type]
        Packed([[1, 2], [3]], 3),  # type: ignore[arg-type]
        Packed([[1, 2], [3]], 2, end=0),  # type: ignore[arg-type]
        Packed([[1, 2], [3]], 2, pad=0),  # type: ignore[arg-type]
    ]
    assert len({str(fingerprint(data, len(data), 0)) for data in made}) == 5


def test_rows_beyond_the_last_are_no_rows() -> None:
    with pytest.raises(IndexError):
        Packed([[1, 2]], 2)[1]  # type: ignore[arg-type]


LEFT_OUT = "leave it out of train_data by "


def test_a_document_whose_rows_are_left_out_is_not_read_for_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Damaged(list[list[int]]):
        def __getitem__(self, index: Any) -> Any:
            assert index
            return super().__getitem__(index)

    data = Packed(Damaged([[1, 2], [3, 4], [5]]), 1, lengths=[2, 2, 1])  # type: ignore[arg-type]
    assert fingerprint(data, 5, 0, {0, 1}.__contains__) != fingerprint(data, 5, 0, {0, 1, 4}.__contains__)
    monkeypatch.setattr("lockstep.data.fingerprint.PAUSES_S", (0.0, 0.0, 0.0))
    with raises(problems.FINGERPRINT_SAMPLE, what="document 0", leave_out=LEFT_OUT + "data.without=0-1, "):
        fingerprint(data, 5, 0, {0}.__contains__)
    mixed = Mixture({"web": [1] * 4, "books": data}, {"web": 1, "books": 1})  # type: ignore[dict-item]
    where = {"what": "document 0 of source 'books'", "leave_out": LEFT_OUT + "data.without=4-5, "}
    with raises(problems.FINGERPRINT_SAMPLE, **where):
        fingerprint(mixed, 9, 0)
    assert fingerprint(mixed, 9, 0, {4, 5}.__contains__)
    no_row = Packed(Damaged([[]]), 2, lengths=[0])  # type: ignore[arg-type]
    with raises(problems.FINGERPRINT_SAMPLE, what="document 0", leave_out=""):
        fingerprint(no_row, 0, 0)
