r"""The one way from a text to a terminal, a log or a page: nothing in it can move a cursor, set a title or pass for markup.

Texts come from data: names of runs, errors of jobs, tags in a store, records of strangers. Whatever shows one calls one of four functions:

* `printable` for a text of lines, `on_one_line` for a value within a line, where a line break would begin a false line;
* `streamed` for the output of another process;
* `markdown` for a page that is made of Markdown or HTML.

What is escaped: the control characters C0, C1 and DEL, which ANSI and OSC sequences begin with; the characters that reorder text (bidi), break
lines or are invisible tags; and halves of surrogate pairs, which no encoding has. Escapes are Python's: `\x1b`, `\u202e`.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
_UNSEEN = r"\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f\ud800-\udfff"
"""Bidi controls (Unicode's UAX 9), line and paragraph separators, invisible operators, tags, surrogates."""
_UNPRINTABLE = re.compile(rf"[{_CONTROL}{_UNSEEN}]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_MARKUP = re.compile(r"[\\`*\[\]<>|&~]|(?<!\w)_|_(?!\w)")
"""What begins something in Markdown within a line; an underscore within a word does not."""
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_SEVERAL = re.compile(r"((?:metrics|artifacts) {2,}|  )(?=\S)")
"""How a line begins that says several things, with two blanks between them: `metrics   train/loss 0.1  eval/loss 0.2`, or an item of a list."""


def printable(text: str) -> str:
    """A text of lines for a terminal or a log: what is not to be seen is escaped; line breaks and tabs stay."""
    return text if text.isascii() and text.isprintable() else _UNPRINTABLE.sub(_escape, text)


def on_one_line(text: str) -> str:
    """A value for a place within a line, such as a cell of a table: line breaks and tabs are escaped too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def streamed(text: str) -> str:
    """Output of another process, in pieces: as `printable`, without colours, and with a line for each state of a progress bar."""
    plain = _COLOUR.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return printable(plain)


def markdown(text: str) -> str:
    """A value within Markdown, shown as it is: no link, image, emphasis, table or HTML comes of it."""
    return _MARKUP.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), on_one_line(text))


def size_text(size: int) -> str:
    """A size for a person: 1 MiB is 1048576 bytes."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, each as wide as its widest cell."""
    shown = [[on_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    )


def folded(text: str, columns: int) -> str:
    """A text for a terminal of so many columns: a line that says several things is broken between two of them, and not in a word."""
    return "\n".join(_folded(line, columns) for line in text.split("\n"))


def _folded(line: str, columns: int) -> str:
    match = _SEVERAL.match(line)
    if match is None or len(line) <= columns:
        return line
    margin = " " * max(4, match.end())
    lines, begun = [match[0]], False
    for gap, entry in re.findall(r"( *)(\S+(?: \S+)*)", line[match.end() :]):
        if begun and len(lines[-1]) + len(gap) + len(entry) > columns:
            lines.append(margin)
            gap = ""
        words = textwrap.wrap(
            entry, max(20, columns - len(margin)), break_long_words=False, break_on_hyphens=False
        )
        lines[-1] += gap + words[0]
        lines += [margin + word for word in words[1:]]
        begun = True
    return "\n".join(lines)


def write(text: str, stream: TextIO) -> None:
    """Write a text as it can be printed. Raises OSError where the stream takes nothing more."""
    stream.write(printable(text))
    stream.flush()


def complain(line: str) -> None:
    """Write a line to standard error. Raises OSError."""
    write(f"{line}\n", sys.stderr)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
