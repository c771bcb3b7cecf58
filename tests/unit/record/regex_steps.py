"""How many steps a backtracking engine takes over a text: Python's own expressions, walked without its shortcuts, and counted."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from re import _constants as C  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

Groups = dict[int, tuple[int, int]]


class Counted:
    """An expression, and the steps that searching texts with it took."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._tree = list(_parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE))
        self._ignore_case = bool(pattern.flags & re.IGNORECASE)
        self._single: dict[Any, re.Pattern[str]] = {}
        self.steps = 0

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where it matches, one after the other."""
        found, at = [], 0
        sys.setrecursionlimit(1_000_000)
        while at <= len(text):
            end = next(self._run(self._tree, 0, text, at, {}), None)
            if end is None:
                at += 1
                continue
            found.append((at, end[0]))
            at = max(end[0], at + 1)
        return found

    def _run(
        self, nodes: list[Any], i: int, text: str, at: int, groups: Groups
    ) -> Iterator[tuple[int, Groups]]:
        self.steps += 1
        if i == len(nodes):
            yield at, groups
            return
        kind, value = nodes[i]
        for end, now in self._node(kind, value, text, at, groups):
            yield from self._run(nodes, i + 1, text, end, now)

    def _node(
        self, kind: Any, value: Any, text: str, at: int, groups: Groups
    ) -> Iterator[tuple[int, Groups]]:
        if kind in (C.LITERAL, C.NOT_LITERAL, C.IN, C.ANY):
            if at < len(text) and self._fits(kind, value, text[at]):
                yield at + 1, groups
        elif kind is C.BRANCH:
            for branch in value[1]:
                yield from self._run(list(branch), 0, text, at, groups)
        elif kind is C.SUBPATTERN:
            for end, now in self._run(list(value[3]), 0, text, at, groups):
                yield end, now if value[0] is None else {**now, value[0]: (at, end)}
        elif kind is C.ATOMIC_GROUP:
            yield from self._first(self._run(list(value), 0, text, at, groups))
        elif kind is C.POSSESSIVE_REPEAT:
            yield from self._first(self._repeat(value, text, at, groups, greedy=True))
        elif kind in (C.MAX_REPEAT, C.MIN_REPEAT):
            yield from self._repeat(value, text, at, groups, greedy=kind is C.MAX_REPEAT)
        elif kind is C.GROUPREF:
            start, end = groups[value]
            if text.startswith(text[start:end], at):
                yield at + end - start, groups
        elif kind is C.AT:
            if self._at(value, text, at):
                yield at, groups
        elif kind in (C.ASSERT, C.ASSERT_NOT):
            direction, inner = value
            start = at if direction > 0 else at - inner.getwidth()[0]
            met = None if start < 0 else next(self._run(list(inner), 0, text, start, groups), None)
            if (met is not None) == (kind is C.ASSERT):
                yield at, groups if met is None else met[1]
        else:
            raise NotImplementedError(str(kind))

    def _repeat(
        self, value: Any, text: str, at: int, groups: Groups, *, greedy: bool
    ) -> Iterator[tuple[int, Groups]]:
        least, most, inner = value[0], value[1], list(value[2])
        ends = [
            (at, groups)
        ]  # each round's first way: enough where a round has one, which `Counted` is held against
        if not greedy:
            while True:
                if len(ends) > least:
                    yield ends[-1]
                if len(ends) > most or not self._round(inner, text, ends):
                    return
        while len(ends) <= most and self._round(inner, text, ends):
            pass
        for count in range(len(ends) - 1, least - 1, -1):
            self.steps += 1
            yield ends[count]

    def _round(self, inner: list[Any], text: str, ends: list[tuple[int, Groups]]) -> bool:
        at, groups = ends[-1]
        met = next(self._run(inner, 0, text, at, groups), None)
        if met is None or met[0] == at:
            return False
        ends.append(met)
        return True

    @staticmethod
    def _first(ways: Iterator[tuple[int, Groups]]) -> Iterator[tuple[int, Groups]]:
        met = next(ways, None)
        if met is not None:
            yield met

    def _fits(self, kind: Any, value: Any, character: str) -> bool:
        if kind is C.ANY:
            return character != "\n"
        if kind is C.IN:
            negate = value[0][0] is C.NEGATE
            return any(self._member(one, character) for one in value[negate:]) != negate
        return self._member((C.LITERAL, value), character) != (kind is C.NOT_LITERAL)

    def _member(self, one: Any, character: str) -> bool:
        kind, value = one
        forms = {character, character.lower(), character.upper()} if self._ignore_case else {character}
        if kind is C.LITERAL:
            return chr(value) in forms
        if kind is C.RANGE:
            return any(len(form) == 1 and value[0] <= ord(form) <= value[1] for form in forms)
        return _CATEGORY[value](character)

    def _at(self, value: Any, text: str, at: int) -> bool:
        if value in (C.AT_BEGINNING, C.AT_BEGINNING_STRING):
            return at == 0
        if value is C.AT_END:
            return at == len(text) or (at == len(text) - 1 and text[at] == "\n")
        if value is C.AT_END_STRING:
            return at == len(text)
        word = [0 <= i < len(text) and _is_word(text[i]) for i in (at - 1, at)]
        return (word[0] != word[1]) == (value is C.AT_BOUNDARY)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_CATEGORY: dict[Any, Callable[[str], bool]] = {
    C.CATEGORY_WORD: _is_word,
    C.CATEGORY_NOT_WORD: lambda one: not _is_word(one),
    C.CATEGORY_SPACE: str.isspace,
    C.CATEGORY_NOT_SPACE: lambda one: not one.isspace(),
    C.CATEGORY_DIGIT: str.isdigit,
    C.CATEGORY_NOT_DIGIT: lambda one: not one.isdigit(),
}
