"""What comes from data reaches a terminal, a log or a page through `lockstep.printing`, and through nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.driver.notebook import as_table
from lockstep.printing import markdown, on_one_line, printable, streamed, table
from lockstep.record.mirror.documents import Verdict, note
from lockstep.record.mirror.run_texts import Texts
from tests.forked import ROOT

ATTACK = (
    "\x1b]0;OWNED\x07\x1b[2J\x1b[31mFAKE\x1b[0m\x1b]52;c;cm0gLXJmIH4K\x07\x9b2J\x7f\u202egnp.exe\u2066\r\b"
)
PRINTS_FOR_ITSELF = {
    "printing.py",
    "proof/guard_worker.py",  # runs with another version's Lockstep; its parent prints what it says
}
_STREAMS = {"sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}


def is_seen(character: str) -> bool:
    return unicodedata.category(character) not in {"Cc", "Cs", "Zl", "Zp"} and unicodedata.bidirectional(
        character
    ) not in {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


@given(st.text(st.characters()))
def test_no_text_has_a_control_character_left(text: str) -> None:
    assert all(is_seen(one) or one in "\n\t" for one in printable(text))
    assert all(map(is_seen, on_one_line(text)))
    assert all(is_seen(one) or one in "\n\t" for one in streamed(text))


@given(st.text(st.characters(categories=["L", "M", "N", "P", "S"])))
def test_what_people_write_is_printed_as_it_is(text: str) -> None:
    """Every language, and emoji with their joiners."""
    assert printable(text) == text
    assert printable("👩\u200d💻 héllo\n\t\u05e9\u05dc") == "👩\u200d💻 héllo\n\t\u05e9\u05dc"


def test_the_attack_is_shown_as_escapes() -> None:
    shown = printable(ATTACK)
    assert shown.startswith(r"\x1b]0;OWNED\x07\x1b[2J") and r"\x9b2J\x7f\u202egnp.exe\u2066\x0d\x08" in shown


def test_a_value_begins_no_line_of_a_table() -> None:
    assert table([["NAME", "STEP"], ["a\nFAKE  9", "1"]]).split("\n") == [
        "NAME        STEP",
        r"a\nFAKE  9  1",
    ]


def test_output_of_a_job_keeps_its_lines_and_loses_its_colours() -> None:
    assert (
        streamed("\x1b[1;31mloss\x1b[0m 0.5\r\n 10%|#\r 20%|##\n\x1b[2J")
        == "loss 0.5\n 10%|#\n 20%|##\n\\x1b[2J"
    )


@pytest.mark.parametrize(
    "text",
    ["<img src=//evil/x>", "![x](//evil/x)", "[click](javascript:0)", "**FINISHED**", "_x_", "a|b", "`x`"],
)
def test_a_value_is_no_markup_of_the_runs_page(text: str) -> None:
    """Only the status is bold."""
    page = note(Verdict("FAILED", f": {text}", (text,)), {text: text})
    assert text not in page and page.startswith("**FAILED**: ")
    assert markdown("eval/grad_norm 0.25") == "eval/grad_norm 0.25"


def test_a_table_of_a_notebook_is_no_html_of_its_values() -> None:
    shown = as_table({"<b>": f"<script>{ATTACK}"})
    assert "<script>" not in shown and "<b>" not in shown and "\x1b" not in shown


def test_a_log_and_a_workers_output_have_no_control_characters(tmp_path: Path) -> None:
    texts = Texts(tmp_path)
    texts.log(ATTACK)
    texts.output("rank-0", f"{ATTACK}\n")
    for path in [tmp_path / "log.txt", *texts.end()]:
        assert all(is_seen(one) or one == "\n" for one in path.read_text())


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("command", ["runs", "show"])
def test_a_strangers_record_sends_the_terminal_nothing(command: str, tmp_path: Path) -> None:
    run_id = "b" * 32
    folder = tmp_path / "runs" / run_id
    folder.mkdir(parents=True)
    run = {
        "run_id": run_id, "name": f"x{ATTACK}\nFAKE", "status": "FINISHED", "started": 1.0, "ended": 2.0, "params": {},
        "tags": {"lockstep.error": f"boom{ATTACK}\nFAKE", "lockstep.heartbeat": "1"},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    lockstep = [sys.executable, "-m", "lockstep", *([command] if command == "runs" else [command, run_id])]
    for further in ([], ["--json"]):
        done = subprocess.run(
            [*lockstep, "--uri", "off", "--storage", str(tmp_path / "runs"), *further],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        assert "OWNED" in done.stdout
        assert all(is_seen(one) or one == "\n" for one in done.stdout + done.stderr)
        assert not any(line.startswith("FAKE") for line in done.stdout.splitlines())


def printed_past(tree: ast.AST) -> list[str]:
    """The calls in a module that put a text on a terminal by another way than the printer."""
    direct = {"print", "typer.echo", "typer.secho", "click.echo", "click.secho", "rich.print"}
    direct |= {f"{stream}.{how}" for stream in _STREAMS for how in ("write", "writelines", "buffer.write")}
    last_words = {name.rpartition(".")[2] for name in direct}
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [
        name
        for function in called
        if getattr(function, "attr", getattr(function, "id", "")) in last_words
        and (name := ast.unparse(function)) in direct
    ]


def test_nothing_prints_past_the_printer() -> None:
    package = ROOT / "platform" / "lockstep"
    modules = [path for path in package.rglob("*.py") if "starters" not in path.parts]
    assert len(modules) > 300
    for path in modules:
        name = path.relative_to(package).as_posix()
        if name not in PRINTS_FOR_ITSELF:
            assert not printed_past(ast.parse(path.read_bytes())), f"{name}: use lockstep.printing"


def test_the_contract_sees_what_prints_past() -> None:
    tree = ast.parse(
        "import sys\nprint(1)\nsys.stderr.write('x')\nsys.stdout.buffer.write(b'x')\ntyper.echo('x')"
    )
    assert len(printed_past(tree)) == 4


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["--version", "--json"]])
def test_a_full_disk_is_one_line_and_a_failure(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *arguments],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "No space left on device" in done.stderr
