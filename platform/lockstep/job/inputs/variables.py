"""Which environment variables the code of a job reads, and what they held: inputs that no spec names.

A read counts where a file of the job makes it, by `os.environ`, `os.environb` or `os.getenv`, or has Python's library make it (`expandvars`).
What torch, Lockstep or any installed package reads for itself is none of the job's. Of a copy of the whole environment, such as for a process
that the job starts, it is noted that there was one: which variables count there, nothing tells.

What a module reads while it is imported is kept with its file, since a later run in the process imports it no more. What is read otherwise is kept
with the run.
"""

from __future__ import annotations

import mmap
import os
import re
import select
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, Literal, cast

from lockstep.job.frames import is_of_the_job
from lockstep.job.inputs.external_reads import ExternalReads

RANK = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "SLURM_PROCID",
    "SLURM_NTASKS",
)
"""Variables by which launchers tell a process its place among others. They are kept from a job, so that it reads none of them."""

Values = dict[str, str | None]
"""What variables held when they were first read, by name; None for one that was not set."""


class Reads:
    """The variables that were read, and those that the job itself had set before: what it reads of these is no input.

    Beside them is what the job takes from outside itself in other ways: see `outside`.
    """

    def __init__(self) -> None:
        self.values: Values = {}
        self.set_by_job: set[str] = set()
        self.copied_at = ""
        """Where the job first copied the whole environment."""
        self.outside = ExternalReads()

    def read(self, name: str, value: str | None) -> None:
        """Note a read."""
        if name not in self.values and name not in self.set_by_job and name not in _AT_IMPORT_SET:
            self.values[name] = value

    def set(self, name: str, value: str) -> None:
        """Note that the job sets a variable. One that was not set before is as if it had been set so, as by `setdefault`."""
        if name not in self.values:
            self.set_by_job.add(name)
        elif self.values[name] is None:
            self.values[name] = value


_AT_IMPORT = dict[str, tuple[object, Reads]]()
"""By the file of a module, what it read while it was imported, and its spec, which is another one if it is imported anew."""
_AT_IMPORT_SET = set[str]()
"""Variables that modules set while they were imported."""

_current: Reads | None = None
"""The reads of the run that this process works on."""

_NOTED = "_lockstep_variables"


@contextmanager
def variables_noted(reads: Reads) -> Iterator[None]:
    """Note what the job reads in the block, in all threads."""
    global _current
    previous, _current = _current, reads
    watch()
    try:
        yield
    finally:
        _current = previous


def keep_reads(job: object, reads: Reads) -> None:
    """Keep what a job reads, from its `__init__` on, with the job."""
    vars(job)[_NOTED] = reads


def reads_of(job: object) -> Reads:
    """The reads of a job since it was made."""
    reads: Reads = vars(job).setdefault(_NOTED, Reads())
    return reads


def read_by(job: object, files: Iterable[str]) -> Values:
    """What a job has read so far, and what its files read when they were imported."""
    return {name: value for reads in reads_by(job, files) for name, value in reads.values.items()}


def copied_by(job: object, files: Iterable[str]) -> str:
    """Where a job first copied the whole environment, such as `job.py:12`; nothing where it has not."""
    return next((reads.copied_at for reads in reads_by(job, files) if reads.copied_at), "")


def reads_by(job: object, files: Iterable[str]) -> list[Reads]:
    """What a job's files read when they were imported, and what it has read since it was made."""
    noted = (_AT_IMPORT[file] for file in sorted(files) if file in _AT_IMPORT)
    return [*(reads for spec, reads in noted if not _imported_anew(spec)), reads_of(job)]


def _imported_anew(spec: object) -> bool:
    """Whether the module that was imported by a spec has been imported by another one since, and has read nothing."""
    module = sys.modules.get(getattr(spec, "name", ""))
    return module is not None and module.__spec__ is not spec


def current_reads() -> Reads | None:
    """The reads of the run that this process works on."""
    return _current


def held_now(names: Iterable[str]) -> Values:
    """What variables hold in this process, and no read of them."""
    data: dict[bytes, bytes] = cast(Any, os.environ)._data
    raw = {name: data.get(os.fsencode(name)) for name in names}
    return {name: None if value is None else os.fsdecode(value) for name, value in raw.items()}


_PLACE_NAMES = re.compile(
    r"(?:.*_)?(?:HOME|PATHS?|DIRS?|DIRECTORY|ROOT|FOLDERS?|FILES?|CACHE|TMP|TEMP|TMPDIR|PWD|UR[IL]|HOST|HOSTNAME|ADDR|ADDRESS|PORT|ENDPOINT|PROXY"
    r"|USER|USERNAME|LOGNAME|SHELL|TERM|DISPLAY|DEVICES|SOCKET|JOB_?ID|NODELIST|NUM_THREADS)"
    r"|(?:SLURM|PBS|LSB|OMPI|PMI|RAY|KUBERNETES|XDG|CONDA|VIRTUAL_ENV|SSH|AWS|WANDB|MLFLOW|NCCL|GLOO|LOCKSTEP)(?:_.*)?",
    re.IGNORECASE,
)
_PLACE_VALUES = re.compile(r"[~/]|[a-zA-Z][a-zA-Z0-9+.-]+://|[A-Za-z]:\\\\")
"""How an absolute path or a URI begins."""


def is_placement(name: str, value: str | None, declared: Iterable[str] = ()) -> bool:
    """Whether a variable says where something is or what a machine has, and not what is computed.

    By its name, or since it holds an absolute path or a URI, or because the job has `declared` it.
    """
    if name in declared or name in RANK or _PLACE_NAMES.fullmatch(name):
        return True
    return value is not None and _PLACE_VALUES.match(value) is not None


# --- the reads ------------------------------------------------------------------------------------------------

_Role = Literal["job", "library", "through"]
_SKIPPED = frozenset(
    name
    for module in ("os", "posixpath", "ntpath", "_collections_abc")
    for name in (f"<frozen {module}>", os.path.join(os.path.dirname(os.__file__), f"{module}.py"))  # noqa: PTH118, PTH120
)
"""Files whose functions read for their callers, by the names that their code has."""
_WHOLE = frozenset({"__iter__", "copy", "__or__", "__ror__"})
"""Functions in these files that read all variables."""


@cache
def _role(file: str) -> _Role:
    if file in _SKIPPED or file.startswith("<"):
        return "through"
    return "job" if is_of_the_job(file) else "library"


_copies = threading.local()
"""Where a thread has asked for the names of all variables: frame and instruction. A read at that very instruction is of a copy."""


def _reader(frame: FrameType | None, *, whole: bool = False) -> FrameType | None:
    """The frame of the job's code that reads one variable. None where other code does, or it reads them all, which is noted as a copy.

    `whole`: whether the function that it calls reads them all.
    """
    while frame is not None and (role := _role(frame.f_code.co_filename)) != "job":
        if role == "library":
            return None
        whole |= frame.f_code.co_name in _WHOLE and frame.f_code.co_filename in _SKIPPED
        frame = frame.f_back
    if frame is None:
        return None
    if whole or getattr(_copies, "at", None) == (id(frame), frame.f_lasti):
        if (reads := reads_at(frame)) is not None and not reads.copied_at:
            reads.copied_at = place_of(frame)
        return None
    return frame


def place_of(frame: FrameType) -> str:
    """Where a frame is, such as `job.py:12`."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH119


def _importing(frame: FrameType | None) -> FrameType | None:
    """The frame of the job's module that is being imported where a frame is; None where none is."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return frame if _role(code.co_filename) == "job" else None
        frame = frame.f_back
    return None


def reads_at(frame: FrameType) -> Reads | None:
    """Where a read or a change by a frame of the job is noted."""
    if (module := _importing(frame)) is None:
        return _current
    file, spec = os.path.realpath(module.f_code.co_filename), module.f_globals.get("__spec__")
    if file not in _AT_IMPORT or _AT_IMPORT[file][0] is not spec:
        _AT_IMPORT[file] = (spec, Reads())
    return _AT_IMPORT[file][1]


def watch() -> None:
    """Have reads of the environment noted in this process from now on. It costs a read half a microsecond."""
    kind: Any = type(os.environ)
    if hasattr(kind, "_lockstep"):
        return
    kind._lockstep = True
    get, put, repr_of = kind.__getitem__, kind.__setitem__, kind.__repr__

    def read(self: Any, key: Any) -> Any:
        try:
            value = get(self, key)
        except KeyError:
            value = None
        reader = _reader(sys._getframe(1))
        if reader is not None and (reads := reads_at(reader)) is not None:
            reads.read(os.fsdecode(key), None if value is None else os.fsdecode(value))
        if value is None:
            raise KeyError(key) from None
        return value

    def change(self: Any, key: Any, value: Any) -> None:
        put(self, key, value)
        reader = _reader(sys._getframe(1))
        if reader is not None and (reads := reads_at(reader)) is not None:
            reads.set(os.fsdecode(key), os.fsdecode(value))
            if reads is not _current:
                _AT_IMPORT_SET.add(os.fsdecode(key))

    def names(self: Any) -> Any:
        caller = sys._getframe(1)
        _copies.at = (id(caller), caller.f_lasti)
        return super(kind, self).keys()

    def shown(self: Any) -> str:
        _reader(sys._getframe(1), whole=True)
        return str(repr_of(self))

    kind.__getitem__, kind.__setitem__, kind.keys, kind.__repr__ = read, change, names, shown


# --- those of loader processes --------------------------------------------------------------------------------


class Channel:
    """Takes what forked processes read to the process that has forked them. Its `arrived` is asked after each step, and costs nothing."""

    def __init__(self) -> None:
        self._from, self._to = os.pipe()
        os.set_blocking(self._from, False)
        self._mark = mmap.mmap(-1, 1)

    def send(self, name: str, *, waits: bool = True) -> None:
        """In a forked process: report a read. What the variable holds its parent knows.

        One that does not wait is dropped where there is no room: the parent may be waiting for what this process fetches.
        """
        message = os.fsencode(name)[:1000]
        if waits or select.select([], [self._to], [], 0)[1]:
            os.write(self._to, len(message).to_bytes(4, "big") + message)  # so little is written as a whole
            self._mark[0] = 1

    def arrived(self) -> list[str]:
        """The names that were reported since it was asked last."""
        if not self._mark[0]:
            return []
        self._mark[0] = 0
        names = list[str]()
        while True:
            try:
                size = os.read(self._from, 4)
            except BlockingIOError:
                return names
            names.append(os.fsdecode(os.read(self._from, int.from_bytes(size, "big"))))


class _Reported(dict[str, "str | None"]):
    """Values that are reported when they are noted."""

    def __setitem__(self, name: str, value: str | None) -> None:
        super().__setitem__(name, value)
        assert _channel is not None
        _channel.send(name)


_channel: Channel | None = None


_of_files: Channel | None = None
"""That of files and folders: two, so that none of these takes the room of a variable."""


class _ReportedPaths(dict[str, Any]):
    """Files or folders that are reported when they are noted."""

    def __init__(self, noted: dict[str, Any], kind: str) -> None:
        super().__init__(noted)
        self._kind = kind

    def __setitem__(self, path: str, value: Any) -> None:
        super().__setitem__(path, value)
        assert _of_files is not None
        _of_files.send(f"{self._kind}{path}", waits=False)


def open_channel() -> None:
    """Before processes are forked: have them report their reads."""
    global _channel, _of_files
    _channel, _of_files = _channel or Channel(), _of_files or Channel()


def report_reads() -> None:
    """In a forked process: report what is read from here on."""
    if _current is not None and _channel is not None:
        _current.values = _Reported(_current.values)
        outside = _current.outside
        outside.files, outside.folders = (
            _ReportedPaths(outside.files, "f"),
            _ReportedPaths(outside.folders, "d"),
        )


def arrived() -> None:
    """Note what forked processes have reported."""
    if _channel is not None and _current is not None:
        for name, value in held_now(_channel.arrived()).items():
            _current.read(name, value)
    if _of_files is not None and _current is not None:
        for message in _of_files.arrived():
            note = _current.outside.read if message[0] == "f" else _current.outside.listed
            note(message[1:])
