"""A folder through losses of power: the calls that change it are noted, and what a disk may have of them is made again.

`Noted.watching()` stands before the real calls of the system, which are made. After a loss of power the disk has

* of a file: all that was written before it was last flushed; of what was written since, anything: nothing, all, some writes
  and not those before them, a half of one, zeros.
* of a folder: all names that it got or lost before it was last flushed; of what was changed since, here and in other folders,
  any changes that do not need each other. A rename is one change, made or not made. What is in a folder whose own name
  is lost is lost with it.
"""

from __future__ import annotations

import builtins
import io
import itertools
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from unittest import mock

How = Literal["dropped", "kept", "names", "zeros", "contents", "ordered", "reordered"]
"""What becomes of what was not flushed: nothing of it is left, or all; the names and not the contents, or zeros for them; the
contents and not the names; all up to some moment; whatever chance decides."""
HOWS: tuple[How, ...] = get_args(How)
ROOT = 0
Key = tuple[int, str]
"""A folder, and a name in it."""


class Call(NamedTuple):
    """One change of a file or folder, which `inode` numbers. `keys` are the names that it makes or takes away."""

    kind: Literal["file", "folder", "link", "move", "gone", "write", "cut", "flush"]
    inode: int
    keys: tuple[Key, ...] = ()
    at: int = 0
    """Of a write or a cut: where in the file."""
    content: bytes = b""


@dataclass
class Disk:
    """Files and folders by their numbers, which stay when names change."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytearray] = field(default_factory=dict)

    def make(self, call: Call) -> None:
        """Let a change be made. Of folders that are not there, it is made where nobody sees it."""
        match call.kind:
            case "flush":
                return
            case "write" | "cut":
                file = self.files.setdefault(call.inode, bytearray())
                file.extend(bytes(max(0, call.at - len(file))))
                if call.kind == "cut":
                    del file[call.at :]
                else:
                    file[call.at : call.at + len(call.content)] = call.content
                return
            case "file":
                self.files.setdefault(call.inode, bytearray())
            case "folder":
                self.folders.setdefault(call.inode, {})
            case "move":
                folder, name = call.keys[0]
                if self.folders.get(folder, {}).get(name) == call.inode:
                    del self.folders[folder][name]
        folder, name = call.keys[-1]
        names = self.folders.setdefault(folder, {})
        if call.kind == "gone":
            names.pop(name, None)
        else:
            names[name] = call.inode

    def tree(self, inode: int = ROOT, above: str = "") -> dict[str, bytes | None]:
        """What can be reached: contents by paths, None for a folder."""
        found: dict[str, bytes | None] = {}
        for name, inner in self.folders[inode].items():
            found[f"{above}{name}"] = None if inner in self.folders else bytes(self.files.get(inner, b""))
            if inner in self.folders:
                found |= self.tree(inner, f"{above}{name}/")
        return found

    def write(self, folder: Path) -> None:
        """Make `folder` what can be reached."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path, content in self.tree().items():
            if content is None:
                (folder / path).mkdir()
            else:
                (folder / path).write_bytes(content)


class Noted:
    """The calls that change `folder`, which is there from the first; `moment` is asked before each of them.

    What is written past the calls of `os` and `open` (by a library that is not Python) is noted when it is flushed.
    """

    def __init__(self, folder: Path, moment: Callable[[], Any] = lambda: None) -> None:
        self.folder = folder.absolute()
        self.calls: list[Call] = []
        self.moments: list[Any] = []
        """What `moment` said before each call, and at the end."""
        self._moment = moment
        self._now = Disk()
        self._numbers = itertools.count(1)
        self._open: dict[int, int] = {}
        """What is open, by descriptor."""
        self._lock = threading.RLock()
        self._take_up(self.folder, ROOT)
        self.begun = len(self.calls)
        """How many calls made what was there before, which is on the disk."""

    def left(self, after: int, how: How, chance: random.Random) -> Disk:
        """What a loss of power after so many calls may leave."""
        return _left(self.calls[:after], how, chance)

    def forget_flushes(self, *, of_folders: bool) -> None:
        """As if no folder, or no file, had been flushed: what a store that does not flush them would have left."""
        nothing = -1
        self.calls[self.begun :] = [
            call._replace(inode=nothing)
            if call.kind == "flush" and (call.inode in self._now.folders) == of_folders
            else call
            for call in self.calls[self.begun :]
        ]

    def _take_up(self, folder: Path, inode: int) -> None:
        for path in sorted(folder.iterdir()):
            made = self._make((inode, path.name), is_folder=path.is_dir())
            if path.is_dir():
                self._take_up(path, made)
            else:
                self._note(Call("write", made, content=path.read_bytes()))
                self._note(Call("flush", made))
        self._note(Call("flush", inode))

    def _make(self, key: Key, *, is_folder: bool = False) -> int:
        inode = next(self._numbers)
        self._note(Call("folder" if is_folder else "file", inode, (key,)))
        return inode

    def _note(self, call: Call) -> None:
        self.calls.append(call)
        self.moments.append(self._moment())
        self._now.make(call)

    # --- watching -----------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[Noted]:
        """Note the calls of this process, whichever thread makes them."""
        watched = {
            "open": self._opened, "close": self._closed, "write": self._written, "fsync": self._flushed,
            "fdatasync": self._flushed, "ftruncate": self._cut, "replace": self._moved, "rename": self._moved,
            "link": self._linked, "unlink": self._gone, "remove": self._gone, "mkdir": self._made, "rmdir": self._gone,
        }  # fmt: skip
        patches = {name: self._watched(getattr(os, name), noting) for name, noting in watched.items()}
        opened = self._opened_file(io.open)
        with (
            mock.patch.multiple(os, **patches),
            mock.patch.object(io, "open", opened),
            mock.patch.object(builtins, "open", opened),
        ):
            yield self
        self.moments.append(self._moment())
        self._compare()

    def _compare(self) -> None:
        """AssertionError where the folder was changed by what is not watched."""
        found = {
            str(path.relative_to(self.folder)): None if path.is_dir() else path.read_bytes()
            for path in self.folder.rglob("*")
        }
        noted = self._now.tree()
        assert found == noted, [name for name in {*found, *noted} if found.get(name) != noted.get(name)]

    def _watched(self, real: Callable[..., Any], noting: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                return noting(real, *arguments, **options)

        return watched

    def _inode(self, path: str) -> int | None:
        """What is at a path in the folder now."""
        inode: int | None = ROOT
        for name in Path(path).parts:
            inode = self._now.folders.get(inode, {}).get(name) if inode is not None else None
        return inode

    def _key(self, path: Any, dir_fd: int | None = None) -> Key | None:
        """Folder and name of a path; None where it is not in this folder."""
        if dir_fd is not None:
            above = self._open.get(dir_fd)
            return None if above is None else (above, os.fspath(path))
        inside = os.path.relpath(Path(os.fsdecode(path)).absolute(), self.folder)
        if inside == "." or inside.startswith(".."):
            return None
        folder = self._inode(str(Path(inside).parent))
        return None if folder is None else (folder, Path(inside).name)

    def _at(self, key: Key | None) -> int | None:
        return None if key is None else self._now.folders.get(key[0], {}).get(key[1])

    def _opened(
        self, real: Callable[..., Any], path: Any, flags: int, *more: Any, dir_fd: int | None = None
    ) -> int:
        key = self._key(path, dir_fd)
        inode = ROOT if Path(os.fsdecode(path)).absolute() == self.folder else self._at(key)
        descriptor: int = real(path, flags, *more, dir_fd=dir_fd)
        if inode is None and key is not None and stat.S_ISREG(os.fstat(descriptor).st_mode):
            inode = self._make(key)  # by this call, or before it by a library
        elif inode in self._now.files and flags & os.O_TRUNC:
            self._note(Call("cut", inode))
        self._open.pop(descriptor, None)
        if inode is not None:
            self._open[descriptor] = inode
        return descriptor

    def _opened_file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`open`, through the calls of `os` where it writes to the folder."""

        def opened(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **options: Any) -> Any:
            how = {"w": os.O_TRUNC, "a": os.O_APPEND, "x": os.O_EXCL}.get(mode.strip("bt"))
            if how is None or isinstance(file, int) or "opener" in options or self._key(file) is None:
                return real(file, mode, buffering, *more, **options)
            raw = _Raw(os.open(file, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, 0o666))
            buffered = io.BufferedWriter(raw)
            encoding = options.get("encoding", *more[:1]) if more or options else None
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, write_through=True)

        return opened

    def _closed(self, real: Callable[..., Any], descriptor: int) -> None:
        self._open.pop(descriptor, None)
        real(descriptor)

    def _written(self, real: Callable[..., Any], descriptor: int, data: Any) -> int:
        content = bytes(data)[: real(descriptor, data)]
        inode = self._open.get(descriptor)
        if inode is not None:
            at = os.lseek(descriptor, 0, os.SEEK_CUR) - len(content)
            self._note(Call("write", inode, at=at, content=content))
        return len(content)

    def _flushed(self, real: Callable[..., Any], descriptor: int) -> None:
        real(descriptor)
        inode = self._open.get(descriptor)
        if inode is None:
            return
        if inode in self._now.files:
            content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            if content != self._now.files[inode]:  # by a library
                self._note(Call("cut", inode))
                self._note(Call("write", inode, content=content))
        self._note(Call("flush", inode))

    def _cut(self, real: Callable[..., Any], descriptor: int, size: int) -> None:
        real(descriptor, size)
        if descriptor in self._open:
            self._note(Call("cut", self._open[descriptor], at=size))

    def _moved(self, real: Callable[..., Any], source: Any, target: Any) -> None:
        before, after = self._key(source), self._key(target)
        real(source, target)
        inode = self._at(before)
        if before is not None and after is not None and inode is None and Path(target).is_file():
            inode = self._make(before)  # made by a library
            self._note(Call("write", inode, content=Path(target).read_bytes()))
        if inode is not None and before is not None and after is not None:
            self._note(Call("move", inode, (before, after)))

    def _linked(self, real: Callable[..., Any], source: Any, target: Any, **options: Any) -> None:
        real(source, target, **options)
        inode, key = self._at(self._key(source)), self._key(target)
        if inode is not None and key is not None:
            self._note(Call("link", inode, (key,)))

    def _gone(self, real: Callable[..., Any], path: Any, *, dir_fd: int | None = None) -> None:
        key = self._key(path, dir_fd)
        real(path, dir_fd=dir_fd)
        inode = self._at(key)
        if inode is not None and key is not None:
            self._note(Call("gone", inode, (key,)))

    def _made(
        self, real: Callable[..., Any], path: Any, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> None:
        real(path, mode, dir_fd=dir_fd)
        if (key := self._key(path, dir_fd)) is not None:
            self._make(key, is_folder=True)


class _Raw(io.RawIOBase):
    """A file whose writes are calls of `os`. It has no descriptor for others to write to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(self._descriptor, data)

    def tell(self) -> int:
        return os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


# --- what is left -------------------------------------------------------------------------------------------


def _left(calls: Sequence[Call], how: How, chance: random.Random) -> Disk:
    flushed: dict[int, int] = {}
    for at, call in enumerate(calls):
        if call.kind == "flush":
            flushed[call.inode] = at
    disk = Disk()
    names = [(at, call) for at, call in enumerate(calls) if call.keys]
    for at in _with_what_they_need(names, _names_left(names, flushed, how, chance)):
        disk.make(calls[at])
    writes = [(at, call) for at, call in enumerate(calls) if call.kind in ("write", "cut")]
    moment = chance.randrange(len(calls) + 1)
    for at, call in writes:
        disk.files.setdefault(call.inode, bytearray())
        if at < flushed.get(call.inode, -1):
            disk.make(call)
        else:
            _unflushed(disk, call, how, chance, late=at > moment)
    return disk


def _names_left(
    names: Sequence[tuple[int, Call]], flushed: Mapping[int, int], how: How, chance: random.Random
) -> set[int]:
    """The changes of names that are on the disk: those that were flushed, and of the others those that `how` asks for."""
    sure = {at for at, call in names if any(flushed.get(folder, -1) > at for folder, _ in call.keys)}
    open_ones = [at for at, _ in names if at not in sure]
    match how:
        case "dropped" | "contents":
            return sure
        case "kept" | "names" | "zeros":
            return {at for at, _ in names}
        case "ordered":
            return sure | set(open_ones[: chance.randrange(len(open_ones) + 1)])
    return sure | {at for at in open_ones if chance.random() < 0.5}


def _with_what_they_need(names: Sequence[tuple[int, Call]], chosen: set[int]) -> list[int]:
    """With them, all earlier ones that touch the same name, or the inside of a folder that they take away."""
    keys: set[Key] = set()
    emptied: set[int] = set()
    found = []
    for at, call in reversed(names):
        if at in chosen or not keys.isdisjoint(call.keys) or any(f in emptied for f, _ in call.keys):
            keys.update(call.keys)
            found.append(at)
            if call.kind == "gone":
                emptied.add(call.inode)
    return found[::-1]


def _unflushed(disk: Disk, call: Call, how: How, chance: random.Random, *, late: bool) -> None:
    match how:
        case "kept" | "contents":
            disk.make(call)
        case "zeros":
            disk.make(call._replace(content=bytes(len(call.content))))
        case "ordered":
            if not late:
                disk.make(call)
        case "reordered":
            share = chance.choice([0.0, 0.5, 1.0])
            if share:
                disk.make(call._replace(content=call.content[: int(len(call.content) * share)]))
