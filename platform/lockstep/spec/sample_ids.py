"""Ids of samples as a spec writes them: numbers and ranges, such as `3,17,40-52`. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

MOST = 1 << 62
"""More samples than a dataset can have."""

_ONE = re.compile(r"(\d+)(?:-(\d+))?")


def parse(text: str) -> list[range]:
    """The ranges of ids that a text names, in order and apart from each other. ValueError where it is none."""
    found = []
    for word in text.replace(" ", "").split(","):
        one = _ONE.fullmatch(word)
        if one is None:
            raise ValueError('wanted numbers of samples and ranges of them, such as "3,17,40-52"')
        first, last = int(one[1]), int(one[2] or one[1])
        if last < first:
            raise ValueError(f"{word} ends before it begins")
        if last >= MOST:
            raise ValueError(f"wanted numbers of samples below {MOST}")
        found.append(range(first, last + 1))
    return list(_joined(sorted(found, key=lambda each: each.start)))


def _joined(ranges: Iterable[range]) -> Iterator[range]:
    held: range | None = None
    for one in ranges:
        if held is not None and one.start <= held.stop:
            held = range(held.start, max(held.stop, one.stop))
            continue
        if held is not None:
            yield held
        held = one
    if held is not None:
        yield held


def written(ids: Iterable[int]) -> str:
    """Ids as a text, the same for every order in which they are given: the shortest that `parse` reads."""
    ordered = sorted({*ids})
    if not ordered:
        return ""
    ends = [i + 1 for i, (one, after) in enumerate(pairwise(ordered)) if after != one + 1]
    parts = pairwise([0, *ends, len(ordered)])
    runs = [(ordered[a], ordered[b - 1]) for a, b in parts]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def normal(text: str) -> str:
    """The one text that stands for these ids. ValueError where it is none."""
    return ",".join(str(one.start) if len(one) == 1 else f"{one.start}-{one.stop - 1}" for one in parse(text))


def described(text: str) -> str:
    """How many ids a text names, and the digest of its normal form: what an identity has of them."""
    count = sum(map(len, parse(text)))
    return f"{count} sample{'s' if count != 1 else ''}, sha256 {hashlib.sha256(text.encode()).hexdigest()}"
