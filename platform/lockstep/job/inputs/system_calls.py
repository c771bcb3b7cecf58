"""Has the calls noted by which the code of a job reads files, lists folders and starts other programs, directly or by way of a library.

A call counts where a file of the job is the first on the stack that is neither Python's library nor an installed package. What an import reads
does not: that is known by module. Nor does what Lockstep reads for the job: that is known by the data's fingerprint.

The functions are replaced by others that note and call them, and compare equal to them. Python's own audit hooks would see more. But they would be called for
each `id()` and each look at a frame as well, which takes 0.15 µs every time, and they cannot be taken out again.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache, update_wrapper
from types import FrameType
from typing import Any, Literal, cast

from lockstep import errors
from lockstep.job.frames import is_of_the_job
from lockstep.job.inputs.external_reads import ExternalReads
from lockstep.job.inputs.variables import current_reads, place_of, reads_at

_Role = Literal["job", "python", "package", "end"]
_LOCKSTEP = os.path.realpath(os.path.dirname(errors.__file__)) + os.sep  # noqa: PTH120
_PYTHON = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
_PACKAGES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_OF_SYSTEM = (
    *(
        "/proc/",
        "/sys/",
        "/dev/",
        "/etc/",
        "/usr/lib/",
        "/usr/share/",
        "/usr/local/lib/",
        "/usr/local/share/",
    ),
    *("/var/cache/", "/var/lib/"),
)
"""Where libraries look for what the system has, for no job in particular."""


@cache
def _role(file: str) -> _Role:
    """Whose code a file has. `end`: what it reads is known in another way."""
    if file.startswith("<"):
        return "end" if file.startswith(("<frozen importlib", "<frozen zipimport")) else "python"
    path = os.path.realpath(file)
    if path.startswith(_LOCKSTEP):
        return "end"
    if path.startswith(_PYTHON) and not any(folder in path for folder in _PACKAGES):
        return "python"
    return (
        "job" if is_of_the_job(file) else "package"
    )  # this lists folders, for which Lockstep's own frames must be known by now


def _taker(frame: FrameType | None) -> tuple[FrameType, bool] | None:
    """The frame of the job for which a frame works, and whether by way of an installed package. None where it works for none."""
    by_package = False
    while frame is not None:
        role = _role(frame.f_code.co_filename)
        if role == "job":
            return frame, by_package
        if role == "end":
            return None
        by_package |= role == "package"
        frame = frame.f_back
    return None


def _noted_in(frame: FrameType) -> ExternalReads | None:
    reads = reads_at(frame)
    return None if reads is None else reads.outside


def _path_of(argument: Any) -> str | None:
    """The absolute path that a function is given, as it is written; None for a file that is open already."""
    if isinstance(argument, int) or argument is None:
        return None
    try:
        path = os.fsdecode(os.fspath(argument))
    except TypeError:  # told by the function itself
        return None
    return os.path.abspath(path) if path else None  # noqa: PTH100 - not to follow links


def _is_skipped(path: str, taker: FrameType, *, by_package: bool) -> bool:
    """Whether a file is no input of the job: it is installed, or a package looks for it without being told to."""
    if path.startswith(_PYTHON) or any(folder in path for folder in _PACKAGES):
        return True
    beside = os.path.dirname(os.path.abspath(taker.f_code.co_filename)) + os.sep  # noqa: PTH100, PTH120
    if not by_package or (path.startswith(beside) and f"{os.sep}." not in path[len(beside) - 1 :]):
        return False
    return path.startswith(_OF_SYSTEM) or f"{os.sep}." in path


def _note_file(frame: FrameType | None, argument: Any, *, writes: bool) -> None:
    if (taker := _taker(frame)) is None or (outside := _noted_in(taker[0])) is None:
        return
    path = _path_of(argument)
    if path is None or _is_skipped(path, taker[0], by_package=taker[1]):
        return
    if writes:
        outside.wrote(path)
    else:
        outside.read(path)


def _note_open(frame: FrameType | None, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """`open(file, mode)`."""
    argument = arguments[0] if arguments else named.get("file")
    mode = arguments[1] if len(arguments) > 1 else named.get("mode", "r")
    writes = isinstance(mode, str) and not set("wax+").isdisjoint(mode)
    _note_file(frame, argument, writes=writes)


def _note_os_open(frame: FrameType | None, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """`os.open(path, flags)`."""
    argument = arguments[0] if arguments else named.get("path")
    flags = arguments[1] if len(arguments) > 1 else named.get("flags", 0)
    if named.get("dir_fd") is None and isinstance(flags, int):
        _note_file(frame, argument, writes=flags & os.O_ACCMODE != os.O_RDONLY)


def _note_read(frame: FrameType | None, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """A function whose first argument is the path of a file to read."""
    argument = arguments[0] if arguments else next(iter(named.values()), None)
    _note_file(frame, argument, writes=False)


def _note_listing(frame: FrameType | None, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """`os.listdir(path)` and `os.scandir(path)`."""
    if (taker := _taker(frame)) is None or (outside := _noted_in(taker[0])) is None:
        return
    path = _path_of(arguments[0] if arguments else named.get("path") or ".")
    if path is not None and not _is_skipped(path, taker[0], by_package=taker[1]):
        outside.listed(path)


def _note_program(frame: FrameType | None, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """`os.system(command)`, and a process of `subprocess`."""
    if (taker := _taker(frame)) is None or taker[1] or (outside := _noted_in(taker[0])) is None:
        return
    command = arguments[0] if arguments else named.get("args", named.get("command"))
    words = command if isinstance(command, list | tuple) else [command]
    shown = " ".join(_shown(word) for word in words)
    outside.started(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…", place_of(taker[0]))


_LONGEST = 60
"""Characters of a program that are told."""


def _shown(word: Any) -> str:
    try:
        return os.fsdecode(os.fspath(word))
    except TypeError:
        return str(word)


_Note = Callable[[FrameType | None, Sequence[Any], Mapping[str, Any]], None]


class _Noting:
    """Stands for a built-in function: calls it, after `note` was told of the call. Like that one it is no method of a class that has it."""

    def __init__(self, function: Callable[..., Any], note: _Note, module: str) -> None:
        update_wrapper(self, function)
        self.__module__ = module
        self._function, self._note = function, note

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if (reads := current_reads()) is None or not reads.outside.full:  # data sets open files without end
            self._note(sys._getframe(1), arguments, named)
        return self._function(*arguments, **named)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._function  # `os.open in os.supports_dir_fd`

    def __hash__(self) -> int:
        return hash(self._function)

    def __repr__(self) -> str:
        return repr(self._function)

    def __reduce__(self) -> str:
        return str(self._function.__name__)


def _replace(holder: Any, name: str, note: _Note, module: str) -> None:
    function = getattr(holder, name)
    if not isinstance(function, _Noting):
        setattr(holder, name, _Noting(function, note, module))


def _replace_method(
    kind: Any, name: str, note: Callable[[FrameType | None, Any, Sequence[Any], Mapping[str, Any]], None]
) -> None:
    """The same for a method of a class of Python's."""
    method = getattr(kind, name)
    if hasattr(method, "_lockstep"):
        return

    def noting(self: Any, *arguments: Any, **named: Any) -> Any:
        note(sys._getframe(1), self, arguments, named)
        return method(self, *arguments, **named)

    update_wrapper(noting, method)
    noting._lockstep = True  # type: ignore[attr-defined]
    setattr(kind, name, noting)


def _note_library(
    frame: FrameType | None, _library: Any, arguments: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """`ctypes.CDLL(path)`; one without a folder is the system's."""
    argument = arguments[0] if arguments else named.get("name")
    if isinstance(argument, str) and os.sep in argument:
        _note_read(frame, [argument], {})


def watch_calls() -> None:
    """Have calls noted in this process from now on. It costs one half a microsecond where a library makes it."""
    if isinstance(io.open, _Noting):
        return
    same = builtins.open is io.open
    _replace(io, "open", _note_open, "io")
    if same:
        builtins.open = io.open
    else:  # somebody has replaced it before, and calls the function that was there
        _replace(builtins, "open", _note_open, "builtins")
    _replace(io, "open_code", _note_read, "io")
    _replace(os, "open", _note_os_open, "os")
    for name in ("listdir", "scandir"):
        _replace(os, name, _note_listing, "os")
    _replace(os, "system", _note_program, "os")


def watch_modules() -> None:
    """The same for modules of Python's library that a process does not need before a job is imported."""
    import ctypes
    import sqlite3
    import subprocess
    import tarfile
    import tokenize

    loader = cast(Any, importlib)._bootstrap_external.FileLoader  # of `pkgutil.get_data`
    for module, name in ((tarfile, "bltn_open"), (tokenize, "_builtin_open")):
        setattr(module, name, builtins.open)
    _replace(sqlite3, "connect", _note_read, "sqlite3")
    _replace_method(
        subprocess.Popen,
        "__init__",
        lambda frame, _, arguments, named: _note_program(frame, arguments, named),
    )
    _replace_method(ctypes.CDLL, "__init__", _note_library)
    _replace_method(
        loader, "get_data", lambda frame, _, arguments, named: _note_read(frame, arguments, named)
    )
