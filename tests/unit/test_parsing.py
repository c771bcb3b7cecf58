"""Documents of JSON within bounds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lockstep.parsing import json_document, json_value, strict_json, yaml_value

DEEP = """
import sys
from lockstep.parsing import json_value, strict_json
sys.setrecursionlimit(10**7)
for read in (json_value, strict_json):
    for text in (b"[" * 500_000 + b"]" * 500_000, b'{"a":' * 500_000, b"[" * 500_000):
        try:
            read(text)
        except ValueError as error:
            assert "nested too deep" in str(error)
        else:
            raise AssertionError(text[:9])
"""


def test_a_deep_document_is_refused_whatever_the_recursion_limit_is() -> None:
    """Python's own parser, with a limit that a job has raised, runs out of the stack: the process ends."""
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("read", [json_value, strict_json])
def test_brackets_in_texts_are_no_levels(read: object) -> None:
    assert callable(read)
    document = {"a": ["[[[[{{"] * 300, 'b"[': '\\"[' * 200, "c": [[[]]] * 200}
    assert read(json.dumps(document).encode()) == document


def test_a_key_that_is_given_twice_is_refused() -> None:
    """Readers differ in which of the two values they take: a person would see one, and a proof compare the other."""
    with pytest.raises(ValueError, match="a key is given twice"):
        json_document('{"a": {"seed": 7, "seed": 0}}')
    with pytest.raises(ValueError, match="'seed' is given twice"):
        yaml_value("a:\n  seed: 7\n  seed: 0\n")
    assert json_document('{"a": {"seed": 7}, "seed": 0}') == yaml_value("{a: {seed: 7}, seed: 0}")


def test_a_mapping_that_is_merged_above_the_place_where_it_stands_is_read() -> None:
    """What was merged into it are no keys that are given twice."""
    text = "a: {b: &b {<<: &d {x: 1, y: 2}, x: 3}}\nc: {<<: *b, y: 4}\n"
    assert yaml_value(text) == {"a": {"b": {"x": 3, "y": 2}}, "c": {"x": 3, "y": 4}}
    with pytest.raises(ValueError, match="line 2, 'y' is given twice"):
        yaml_value(text.replace("y: 4", "y: 4, y: 5"))
