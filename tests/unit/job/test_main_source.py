"""A job class of a notebook or script: the module that is made of its cells has all that it uses, or it is refused (G1, G7)."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.job import problems
from lockstep.job.main_source import main_use, module_source
from lockstep.job.recorded_source import source_digest
from tests.raised import raises

Run = Callable[..., tuple[ModuleType, list[str]]]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs cells as a notebook does: each with its text in `linecache`, in one namespace."""
    names: list[str] = []

    def run_cells(*cells: str) -> tuple[ModuleType, list[str]]:
        main = ModuleType("__main__")
        for cell in cells:
            names.append(f"<cell {len(names)} of {id(main)}>")
            linecache.cache[names[-1]] = (len(cell), None, cell.splitlines(keepends=True), names[-1])
            exec(compile(cell, names[-1], "exec"), vars(main))
        return main, list(cells)

    yield run_cells
    for name in names:
        del linecache.cache[name]


JOB = """
class Mine:
    # the comment stays
    def loss(self):
        return F(half(WIDTH))
"""


def source(run: Run, *cells: str) -> str:
    main, texts = run(*cells)
    return module_source("Mine", vars(main), texts)


def test_a_class_comes_with_what_it_uses_and_nothing_else(run: Run) -> None:
    """Imports first, definitions before their users; plots, data and calls stay behind. A comment is source too."""
    text = source(
        run,
        "import math\nfrom math import floor as F\nimport json",
        "WIDTH = 8\nunused = [math.pi] * 3",
        "def half(x: int) -> float:\n    return x / TWO\n\nTWO = 2 * 1\nprint",
        JOB,
        "mine = Mine()\nassert mine.loss() == 4",
    )
    assert text == (
        "from math import floor as F\n\n\nWIDTH = 8\n\n\nTWO = 2 * 1\n\n\ndef half(x: int) -> float:\n    return x / TWO\n\n\n"
        "class Mine:\n    # the comment stays\n    def loss(self):\n        return F(half(WIDTH))\n"
    )
    module: dict[str, object] = {"__name__": "alone"}
    exec(text, module)
    assert module["Mine"]().loss() == 4  # type: ignore[operator]


def test_the_text_does_not_depend_on_the_order_in_which_cells_were_run(run: Run) -> None:
    cells = ["from math import floor as F", "WIDTH = 8", "def half(x): return x / 2", JOB]
    once = source(run, *cells)
    assert source(run, *cells, *cells[:2]) == once
    assert source(run, cells[1], cells[3], cells[2], cells[0]) == once


def test_the_digest_of_the_source_follows_what_the_class_uses_and_nothing_else(run: Run) -> None:
    cells = ["from math import floor as F", "WIDTH = 8", "def half(x): return x / 2", JOB, "lot = 1"]

    def digest(old: str, new: str) -> str:
        text = source(run, *(cell.replace(old, new) for cell in cells))
        return source_digest({"lockstep_main.py": text.encode()})

    same = digest("", "")
    assert digest("lot = 1", "lot = 2") == same
    assert same not in {
        digest("8", "9"),
        digest("/ 2", "/ 3"),
        digest("floor", "ceil"),
        digest("# the", "# a"),
    }


def test_a_cell_that_was_changed_and_run_again_counts(run: Run) -> None:
    text = source(
        run,
        "def half(x): return x / 2",
        JOB,
        "from math import floor as F\nWIDTH = 8",
        "def half(x): return x // 2",
    )
    assert "x // 2" in text
    assert "x / 2" not in text


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (("WIDTH = len(str(F))",), "WIDTH"),  # a value of another cell that no text gives
        (("WIDTH = [8]", "WIDTH.append(3)"), "WIDTH"),  # it has changed since
        (("WIDTH = 8", "globals().update(half=lambda x: x)"), "half"),
        (("from math import *\nWIDTH = 8", "F = floor"), "F"),
        (("WIDTH = len(str(F))", "half = WIDTH.__add__"), "WIDTH, half"),
    ],
)
def test_names_that_are_not_in_the_source_are_refused_in_one_line(
    run: Run, cells: tuple[str, ...], told: str
) -> None:
    begin = () if any("F = " in cell for cell in cells) else ("from math import floor as F",)
    half = () if any("half" in cell for cell in cells) else ("def half(x): return x",)
    with raises(problems.SOURCE_MISSING, name="Mine", got=told) as caught:
        source(run, *begin, *half, *cells, JOB)
    assert "\n" not in str(caught.value)


def test_values_of_the_cell_that_uses_them_are_taken_as_they_are_computed(run: Run) -> None:
    text = source(
        run,
        "import math",
        f"F = math.floor\nTABLE = {{}}\nTABLE['two'] = 2\nWIDTH = TABLE['two'] * 4\nhalf = abs\n{JOB}",
    )
    assert "TABLE = {}\n\n\nTABLE['two'] = 2\n\n\nWIDTH = TABLE['two'] * 4" in text
    module: dict[str, object] = {"__name__": "alone"}
    exec(text, module)
    assert module["Mine"]().loss() == 8  # type: ignore[operator]


def test_what_a_script_does_when_it_runs_stays_behind(run: Run) -> None:
    text = source(
        run,
        "from __future__ import annotations\nfrom math import floor as F\nhalf = abs; WIDTH = 3\n"
        + JOB
        + "if __name__ == '__main__':\n    WIDTH = 4\nMine().loss()\n",
    )
    assert text.startswith("from __future__ import annotations\n")
    assert "WIDTH = 3" in text
    assert "WIDTH = 4" not in text
    assert not text.endswith("loss()\n")


def test_a_class_whose_source_cannot_be_had_is_refused() -> None:
    main = ModuleType("__main__")
    exec("class Mine: ...", vars(main))
    with raises(problems.NO_SOURCE, got="Mine"):
        main_use(main.Mine, main)


def test_a_class_that_was_defined_again_or_inside_a_function_is_refused(run: Run) -> None:
    main, _ = run("class Mine: ...")
    older = main.Mine
    exec("class Mine: ...", vars(main))
    with raises(problems.REPLACED, got="Mine"):
        main_use(older, main)

    class Inner: ...

    with raises(problems.NESTED, got=Inner.__qualname__):
        main_use(Inner)


def test_modules_beside_a_script_come_along_and_installed_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decides about the bits is in the files, and so in the identity and in the record."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "__init__.py").write_text("")
    (tmp_path / "nets" / "conv.py").write_text("from beside import WIDTH\n")
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    (tmp_path / "other.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text("import json\nimport other\nfrom nets import conv\nclass Mine:\n    x = json, conv\n")
    monkeypatch.syspath_prepend(tmp_path)
    main = ModuleType("__main__")
    main.__file__ = str(script)
    exec(compile(script.read_text(), str(script), "exec"), vars(main))
    use, files = main_use(main.Mine, main)
    for name in ("nets", "nets.conv", "beside", "other"):
        del sys.modules[name]
    assert use == "lockstep_main:Mine"
    assert files.keys() == {"lockstep_main.py", "nets/__init__.py", "nets/conv.py", "beside.py"}
    assert (
        files["lockstep_main.py"]
        == b"from nets import conv\nimport json\n\n\nclass Mine:\n    x = json, conv\n"
    )


def test_a_class_of_a_module_is_imported_as_ever() -> None:
    assert main_use(ModuleType) == ("builtins:module", {})
