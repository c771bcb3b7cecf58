"""Documents packed into rows of one length: which tokens of which documents a row has is arithmetic over the documents' lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data import problems
from lockstep.data.dataset import draws_nothing
from lockstep.data.fingerprint import fingerprint, of_part
from lockstep.errors import LockstepError


class Piece(NamedTuple):
    """Tokens `start … stop - 1` of a document, an end token counted with it."""

    document: int
    start: int
    stop: int


class Packed(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens, cut from documents joined without gaps; a document may continue in the next row.

    `documents` is a map-style dataset of one-dimensional integer tensors, or of anything that `torch.as_tensor` takes. `end` is a token
    that is added after each document. `lengths` are the documents' lengths without `end`; if they are not given, each document is read
    once to measure it. The last row is left out unless it is full, or is filled with `pad`.

    A row is a mapping: `tokens` [length]; `documents` [length], which document of the row a token belongs to, from 0, or -1 for padding;
    `positions` [length], the token's place in that document's part of the row, from 0. Raises JobError if the arguments do not fit together.
    """

    def __init__(
        self,
        documents: Dataset[Any],
        length: int,
        *,
        end: int | None = None,
        pad: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        if length < 1:
            raise problems.PACKED_LENGTH(got=length)
        self.documents: Any = documents
        self.length, self.end, self.pad = length, end, pad
        count = _count(self.documents)
        if lengths is None:
            lengths = [len(self._read(i)) for i in range(count)]
        elif len(lengths) != count:
            raise problems.PACKED_LENGTHS(got=len(lengths), wanted=count)
        sizes = np.asarray(lengths, np.int64) + (end is not None)
        self._ends = np.cumsum(sizes) if count else np.zeros(0, np.int64)
        self._starts = self._ends - sizes

    @property
    def draws_nothing(self) -> bool:
        """Whether reading the documents draws nothing."""
        return draws_nothing(self.documents)

    @property
    def tokens(self) -> int:
        """Tokens of all documents, the `end` of each counted."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        full, remainder = divmod(self.tokens, self.length)
        return full + (remainder > 0 and self.pad is not None)

    def pieces(self, row: int) -> list[Piece]:
        """What a row is made of."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return list(self._pieces(row * self.length, min((row + 1) * self.length, self.tokens)))

    def _pieces(self, start: int, stop: int) -> Iterator[Piece]:
        document = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begun, until = int(self._starts[document]), min(stop, int(self._ends[document]))
            if start < until:
                yield Piece(document, start - begun, until - begun)
            start, document = until, document + 1

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        tokens = torch.full((self.length,), self.pad or 0, dtype=torch.int64)
        documents = torch.full((self.length,), -1, dtype=torch.int64)
        positions = torch.zeros(self.length, dtype=torch.int64)
        filled = 0
        for number, piece in enumerate(self.pieces(row)):
            size = piece.stop - piece.start
            span = slice(filled, filled + size)
            tokens[span] = self._whole(piece.document)[piece.start : piece.stop]
            documents[span] = number
            positions[span] = torch.arange(size)
            filled += size
        return {"tokens": tokens, "documents": documents, "positions": positions}

    def _whole(self, document: int) -> Tensor:
        """A document with its end token. Raises JobError where it is not as long as it was said to be."""
        read = self._read(document)
        expected = int(self._ends[document] - self._starts[document]) - (self.end is not None)
        if len(read) != expected:
            raise problems.DOCUMENT_LENGTH(document=document, got=len(read), wanted=expected)
        return read if self.end is None else torch.cat([read, read.new_tensor([self.end])])

    def _read(self, document: int) -> Tensor:
        read = torch.as_tensor(self.documents[document])
        numbers = read.is_floating_point() or read.is_complex()
        if read.dim() != 1 or (numbers and len(read)):  # an empty list makes a float tensor
            raise problems.DOCUMENT_KIND(document=document, dtype=read.dtype, shape=tuple(read.shape))
        return read.to(torch.int64)

    def fingerprint(self, left_out: Callable[[int], bool] = lambda _: False) -> dict[str, Any]:
        """What the documents are, and how they are packed. A document all of whose rows are `left_out` is not read."""

        def rows_of(document: int) -> range:
            start, end = int(self._starts[document]), int(self._ends[document])
            return range(start // self.length, min(-(-end // self.length), len(self)))

        def has_no_row(document: int) -> bool:
            rows = rows_of(document)
            return len(rows) > 0 and all(map(left_out, rows))

        try:
            of_documents = fingerprint(self.documents, len(self.documents), 0, has_no_row)
        except LockstepError as error:
            raise of_part(
                error, lambda what: what.replace("sample", "document", 1), rows_of
            ) from error.__cause__
        return {
            **{f"documents.{field}": value for field, value in of_documents.items()},
            "lengths": hashlib.sha256(self._ends.tobytes()).hexdigest()[:32],
            "row": f"{self.length} tokens, end {self.end}, pad {self.pad}",
        }


def _count(documents: Any) -> int:
    if not hasattr(type(documents), "__len__") or not hasattr(type(documents), "__getitem__"):
        raise problems.PACKED_SOURCE(got=type(documents).__name__)
    return len(documents)
