"""The screen of the README's pictures shows what a terminal would."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.live import Live

from tests.screen import Screen, as_svg, shown


def test_a_line_that_is_rewritten_is_shown_once_and_what_follows_below_it() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=20)
    with Live("one line that is longer than that", console=console, auto_refresh=False) as live:
        live.update("step 2 of many more than fit", refresh=True)
        console.print("[bold]above[/bold]")
    out.write("below\n" + "x" * 25)
    screen = Screen(20)
    screen.write(out.getvalue().replace("\n", "\r\n"))  # as a terminal does
    assert screen.lines() == ["above", "step 2 of many more", "than fit", "below", "x" * 20, "x" * 5]


def test_the_screen_of_a_command_is_had_while_it_runs_and_at_its_end(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-c",
        "import time; print('step 1 ·', flush=True); time.sleep(0.3); print('done')",
    ]
    middle, end = shown(words, tmp_path, dict(os.environ), lambda lines: "step 1 ·" in lines)
    assert middle == ["step 1 ·"]
    assert end[-1] == "done"
    assert "step 1 ·</text>" in as_svg(middle, "count")
