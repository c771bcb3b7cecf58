"""What the code of a job asks of its process and its machine, as its source says: where it runs, as whom, with which arguments and limits.

Such a question makes no call that could be noted at no cost, so the source is searched for it: a fact counts where a file of the job names the function or
attribute that gives it. What it is here is compared when a run is resumed. One that a job asks for by a computed name (`getattr(os, name)`) is not seen.
"""

from __future__ import annotations

import ast
import gc
import getpass
import hashlib
import os
import platform
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple


class Question(NamedTuple):
    """One fact: the dotted names by which code asks for it, and its value here. `None` as value: it is another one in each process."""

    names: frozenset[str]
    value: Callable[[], Any] | None


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()[:16]


def _umask() -> str:
    """From the system's own file: to ask for it any other way is to set it."""
    try:
        match = re.search(
            r"^Umask:\s*(\d+)",
            Path("/proc/self/status").read_text(encoding="ascii", errors="replace"),
            re.MULTILINE,
        )
    except OSError:  # not a Linux
        return "unknown"
    return match[1] if match else "unknown"


def _user() -> list[Any]:
    try:
        return [getpass.getuser(), os.getuid(), os.getgid()]
    except (KeyError, OSError):  # a user without a name
        return [None, os.getuid(), os.getgid()]


def _names(module: str, *names: str) -> frozenset[str]:
    return frozenset(f"{module}.{name}" for name in names)


QUESTIONS: dict[str, Question] = {
    "working folder": Question(_names("os", "getcwd", "getcwdb") | {"pathlib.Path.cwd"}, os.getcwd),
    "arguments": Question(
        _names("sys", "argv", "orig_argv")
        | _names("argparse", "ArgumentParser")
        | {"optparse.OptionParser", "getopt.getopt"},
        lambda: _digest(sys.argv),
    ),
    "host name": Question(
        _names("socket", "gethostname", "getfqdn") | _names("platform", "node", "uname") | {"os.uname"},
        lambda: socket.gethostname(),
    ),
    "user": Question(
        _names("os", "getuid", "geteuid", "getgid", "getegid", "getlogin", "getgroups")
        | {"getpass.getuser", "pathlib.Path.home", "os.path.expanduser"},
        _user,
    ),
    "process id": Question(
        _names("os", "getpid", "getppid", "getpgid", "getsid") | {"multiprocessing.current_process"},
        None,
    ),
    "umask": Question(frozenset({"os.umask"}), _umask),
    "processors": Question(
        _names("os", "cpu_count", "process_cpu_count", "sched_getaffinity")
        | {"multiprocessing.cpu_count", "psutil.cpu_count"},
        lambda: [os.cpu_count(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None],
    ),
    "platform": Question(
        _names("platform", "platform", "release", "version", "machine", "processor", "system", "libc_ver"),
        platform.platform,
    ),
    "module path": Question(frozenset({"sys.path"}), lambda: _digest(sys.path)),
    "interpreter": Question(
        _names("sys", "executable", "prefix", "exec_prefix", "flags"),
        lambda: [sys.executable, repr(sys.flags)],
    ),
    "recursion limit": Question(
        frozenset({"sys.getrecursionlimit", "builtins.RecursionError"}), sys.getrecursionlimit
    ),
    "garbage collector": Question(
        _names("gc", "get_threshold", "isenabled", "get_count"), lambda: [*gc.get_threshold(), gc.isenabled()]
    ),
    "warnings": Question(_names("warnings", "filters"), lambda: _digest(map(repr, warnings.filters))),
    "clock": Question(
        _names(
            "time",
            "time",
            "time_ns",
            "localtime",
            "gmtime",
            "strftime",
            "ctime",
            "monotonic",
            "perf_counter",
            "process_time",
        )
        | _names("datetime.datetime", "now", "today", "utcnow")
        | {"datetime.date.today"},
        None,
    ),
    "entropy": Question(
        _names("os", "urandom", "getrandom")
        | _names("uuid", "uuid1", "uuid4")
        | {"random.SystemRandom", "secrets.token_hex", "secrets.randbelow"},
        None,
    ),
    "network": Question(
        _names("urllib.request", "urlopen", "urlretrieve")
        | _names("requests", "get", "post")
        | {"socket.create_connection"},
        None,
    ),
}
"""The facts, by the name that they are told by."""

ENVIRONMENT = frozenset({"posix.environ"})
"""Names of the whole environment as the process was given it, of which no read can be noted."""

_OF_QUESTIONS = ENVIRONMENT.union(*(question.names for question in QUESTIONS.values()))


def asked(files: Iterable[str]) -> dict[str, str]:
    """The names by which the code in these files asks one of the questions, each with its first line, such as `job.py:12`."""
    lines = dict[str, str]()
    for file in sorted(files):
        for name, line in _asked_in(_source(file)).items():
            lines.setdefault(name, f"{Path(file).name}:{line}")
    return lines


def answers(names: Iterable[str]) -> dict[str, Any]:
    """The answers in this process to the questions that these names ask, by fact."""
    asked_names = set(names)
    return {
        fact: question.value()
        for fact, question in QUESTIONS.items()
        if question.value is not None and question.names & asked_names
    }


def unrepeatable(names: Iterable[str]) -> list[str]:
    """Those of the names whose value is another one each time."""
    return sorted(
        name
        for name in names
        if any(name in question.names for question in QUESTIONS.values() if question.value is None)
    )


def _source(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError:  # it was deleted since
        return b""


@lru_cache(maxsize=1024)
def _asked_in(source: bytes) -> dict[str, int]:
    """The names of the questions in a source, each with its first line."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # told by its import
        return {}
    imported = dict(_imported(tree))
    lines = dict[str, int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (name := _dotted(node, imported)) in _OF_QUESTIONS:
            lines[name] = min(node.lineno, lines.get(name, node.lineno))
    return lines


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a name stands for that an `import` statement gives, wherever that stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _dotted(node: ast.expr, imported: dict[str, str]) -> str:
    """The full dotted name of an expression; nothing where it has none."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "builtins.RecursionError" if node.id == "RecursionError" else "")
    if isinstance(node, ast.Attribute) and (holder := _dotted(node.value, imported)):
        return f"{holder}.{node.attr}"
    return ""
