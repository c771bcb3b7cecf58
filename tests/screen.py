"""What a terminal shows: a command's output on a screen of so many columns, and the screen as an SVG."""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

COLUMNS, ROWS = 80, 24

_CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()=>][0-9A-B]?|\x1b\][^\x07]*\x07")

_CUT = re.compile(rb"(\x1b[^A-Za-z]*|[\xc2-\xf4][\x80-\xbf]*)$")
"""A control sequence or a character of which the end may not have come yet."""


class Screen:
    """The text on a terminal's screen, with as much of a terminal as `rich` uses of one. Colours are left out."""

    def __init__(self, columns: int = COLUMNS) -> None:
        self._columns = columns
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        """Take output; a control sequence must not be cut in two."""
        place = 0
        for control in _CONTROL.finditer(text):
            self._print(text[place : control.start()])
            self._control(control[1] or "", control[2] or "")
            place = control.end()
        self._print(text[place:])

    def lines(self) -> list[str]:
        """Its rows, without the blank ones at the end."""
        return "\n".join("".join(row).rstrip() for row in self._rows).rstrip().split("\n")

    def _print(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._down()
            elif character == "\r":
                self._column = 0
            elif character >= " ":
                if self._column == self._columns:
                    self._column = 0
                    self._down()
                row = self._rows[self._row]
                row += " " * (self._column + 1 - len(row))
                row[self._column] = character
                self._column += 1

    def _down(self) -> None:
        self._row += 1
        while len(self._rows) <= self._row:
            self._rows.append([])

    def _control(self, number: str, kind: str) -> None:
        count = int(number) if number.isdigit() else 1
        if kind == "A":
            self._row = max(0, self._row - count)
        elif kind == "K" and number == "2":
            self._rows[self._row] = []


def shown(
    words: Sequence[str], folder: Path, env: Mapping[str, str], frame: Callable[[list[str]], bool]
) -> tuple[list[str], list[str]]:
    """Run a command in a terminal: the first screen for which `frame` holds, and the last one. RuntimeError where either fails."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        words,
        stdin=child,
        stdout=child,
        stderr=child,
        cwd=folder,
        env={**env, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(child)
    screen, begun, first = Screen(), b"", None
    while chunk := _read(parent):
        cut = _CUT.search(begun + chunk)
        place = len(begun + chunk) if cut is None else cut.start()
        whole, begun = (begun + chunk)[:place], (begun + chunk)[place:]
        screen.write(whole.decode(errors="ignore"))
        if first is None and frame(screen.lines()):
            first = screen.lines()
    if process.wait() or first is None:
        raise RuntimeError("\n".join(screen.lines()))
    return first, screen.lines()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the command has ended
        return b""


def as_svg(lines: Sequence[str], command: str, columns: int = COLUMNS) -> str:
    """A terminal's window of so many columns, with a command and what it shows."""
    width, height, left, top = 8.4, 19.0, 14.0, 44.0
    rows = [f"$ {command}", *lines]
    texts = "\n".join(
        f'<text x="{left}" y="{top + i * height:.0f}" textLength="{len(row) * width:.1f}" xml:space="preserve">{html.escape(row)}</text>'
        for i, row in enumerate(rows)
        if row
    )
    across, down = columns * width + 2 * left, top + len(rows) * height
    lights = "".join(
        f'<circle cx="{18 + 18 * i}" cy="16" r="5.5" fill="{colour}"/>'
        for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across:.0f} {down:.0f}" width="{across:.0f}" height="{down:.0f}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1e1e1e"/>{lights}\n'
        f'<g font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="14" fill="#d4d4d4">\n{texts}\n</g>\n</svg>\n'
    )
