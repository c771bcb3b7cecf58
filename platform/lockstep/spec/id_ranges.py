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
    ranges = []
    for word in text.replace(" ", "").split(","):
        match = _ONE.fullmatch(word)
        if match is None:
            raise ValueError('wanted numbers of samples and ranges of them, such as "3,17,40-52"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{word} ends before it begins")
        if last >= MOST:
            raise ValueError(f"wanted numbers of samples below {MOST}")
        ranges.append(range(first, last + 1))
    return list(_joined(sorted(ranges, key=lambda each: each.start)))


def _joined(ranges: Iterable[range]) -> Iterator[range]:
    pending: range | None = None
    for span in ranges:
        if pending is not None and span.start <= pending.stop:
            pending = range(pending.start, max(pending.stop, span.stop))
            continue
        if pending is not None:
            yield pending
        pending = span
    if pending is not None:
        yield pending


def written(ids: Iterable[int]) -> str:
    """Ids as a text, the same for every order in which they are given: the shortest that `parse` reads."""
    ordered = sorted({*ids})
    if not ordered:
        return ""
    ends = [i + 1 for i, (current, following) in enumerate(pairwise(ordered)) if following != current + 1]
    parts = pairwise([0, *ends, len(ordered)])
    runs = [(ordered[a], ordered[b - 1]) for a, b in parts]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def normal(text: str) -> str:
    """The one text that stands for these ids. ValueError where it is none."""
    return ",".join(
        str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}" for span in parse(text)
    )


def described(text: str) -> str:
    """How many ids a text names, and the digest of its normal form: what an identity has of them."""
    count = sum(map(len, parse(text)))
    return f"{count} sample{'s' if count != 1 else ''}, sha256 {hashlib.sha256(text.encode()).hexdigest()}"
