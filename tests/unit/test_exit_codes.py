"""What ends a command names an entry of the one table of exit codes."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import lockstep
from lockstep.errors import ClusterError, SpecError
from lockstep.exit_codes import DECIDED, SIGNALLED, STOP_SIGNALS, ExitCode, code_of_signal

ENDS = {"Exit", "SystemExit", "exit"}


def test_the_numbers_are_what_they_were() -> None:
    """Scripts, queues and Kubernetes go by them."""
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0, "FAILED": 1, "REFUSED": 2, "MAY_PASS": 75,
        "HUNG_UP": 129, "INTERRUPTED": 130, "TERMINATED": 143,
    }  # fmt: skip
    assert {code_of_signal(number) for number in STOP_SIGNALS} == SIGNALLED
    assert ExitCode.MAY_PASS not in DECIDED
    assert (SpecError("x").exit_code, ClusterError("x").exit_code) == (ExitCode.REFUSED, ExitCode.FAILED)


def test_an_error_keeps_the_code_that_it_was_given() -> None:
    error = ClusterError("x")
    error.exit_code = ExitCode.MAY_PASS
    assert pickle.loads(pickle.dumps(error)).exit_code is ExitCode.MAY_PASS


def numbers(text: str) -> Iterator[str]:
    """The calls and raises of a module that end a command with a number of their own."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            code = node.args[0]
            parts = [code.left, code.right] if isinstance(code, ast.BinOp) else [code]
            if called in ENDS and any(type(getattr(part, "value", None)) is int for part in parts):
                yield ast.unparse(node)


def test_no_command_ends_with_a_number_of_its_own() -> None:
    assert list(numbers("raise SystemExit(128 + number)\nsys.exit(1)\nraise typer.Exit(code)")) == [
        "SystemExit(128 + number)",
        "sys.exit(1)",
    ]  # the control
    package = Path(lockstep.__file__).parent
    found = {str(module): list(numbers(module.read_text())) for module in package.rglob("*.py")}
    assert {module: calls for module, calls in found.items() if calls} == {}
