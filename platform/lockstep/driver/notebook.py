"""A run in a notebook: its live line below the cell, and its result as a table."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep import printing
from lockstep.driver.progress import Progress, ProgressLine, Silent


def in_notebook() -> bool:
    """Whether this interpreter is IPython's: that of a notebook, or its terminal."""
    return "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None


def can_display() -> bool:
    """Whether what is shown can be replaced by something newer: in a notebook, not in IPython's terminal."""
    return in_notebook() and hasattr(sys.modules["IPython"].get_ipython(), "kernel")


def default_progress() -> Progress:
    """What a call from Python shows: a line below the cell in a notebook, else nothing."""
    return CellLine() if can_display() else Silent()


class CellLine:
    """Progress as one line below a cell, which is rewritten; other lines stay above it."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = ""

    def say(self, text: str) -> None:
        printing.write(f"{text}\n", sys.stdout)

    def show(self, line: ProgressLine) -> None:
        self._display(line.text)

    def table(self, headline: str, trials: Sequence[Mapping[str, Any]]) -> None:
        self._display(headline)

    def _display(self, text: str) -> None:
        from IPython.display import display

        if text == self._shown:
            return
        self._shown = text
        if self._handle is None:
            self._handle = display({"text/plain": printing.printable(text)}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": printing.printable(text)}, raw=True)


def as_table(rows: Mapping[str, str]) -> str:
    """A small table in HTML: a row for each name."""
    cells = "".join(
        f'<tr><th style="text-align: left">{_cell(name)}</th>'
        f'<td style="text-align: left">{_cell(text)}</td></tr>'
        for name, text in rows.items()
    )
    return f"<table>{cells}</table>"


def _cell(text: str) -> str:
    return html.escape(printing.printable(text))
