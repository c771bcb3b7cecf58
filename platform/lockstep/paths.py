"""From a name in data to a path: the one way for names out of manifests, journals, statements, archives and stores.

A name is relative, with `/` between its parts, and stays beneath its root. Two things can lead out: the text of the name, which
`relative` and `component` refuse, and symbolic links on the way, which `open_beneath` does not follow out of the root. Linux
resolves a path beneath a folder in one call (`openat2` with RESOLVE_BENEATH, since 5.6). Elsewhere the path is walked part by
part, and no symbolic link is followed at all. One link out is followed: that by which a user has moved a run's folder (`moved`).

Only files and folders are opened: a pipe or a device in the place of a file would be waited for, or have no end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import sys
import unicodedata
from pathlib import Path

LONGEST_NAME = 4096
"""Characters of a name: what Linux takes as a path."""

_OPENAT2 = 437  # the same number on every architecture
_RESOLVE = 0x02 | 0x08  # RESOLVE_NO_MAGICLINKS | RESOLVE_BENEATH
_UNKNOWN = {
    errno.ENOSYS,
    errno.EPERM,
    errno.E2BIG,
    errno.EINVAL,
}  # an older kernel, or a sandbox that knows no openat2
_OUT = {errno.EXDEV, errno.ELOOP}
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}
_LOOK = os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_LOOKS = 8
"""How often a path is looked up again while something in it is renamed: `openat2` answers EAGAIN then."""


class OutsideError(ValueError):
    """A name in data that is no path beneath its root. Example: `../../.ssh/authorized_keys` in a journal."""


def component(name: object) -> str:
    """The name of one file or folder. OutsideError for anything else."""
    text = relative(name)
    if "/" in text:
        raise OutsideError(f"{shown(name)} is a path, wanted the name of one file")
    return text


def relative(name: object) -> str:
    """A path below some root, unchanged. OutsideError if it is absolute, has an empty part, `.` or `..`, or a control character."""
    if not isinstance(name, str):
        raise OutsideError(f"got {shown(name)}, wanted the name of a file")
    if not name or len(name) > LONGEST_NAME:
        raise OutsideError(f"got a name of {len(name)} characters, wanted 1 to {LONGEST_NAME}")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise OutsideError(f"{shown(name)} leads elsewhere, wanted a path below the folder")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise OutsideError(f"{shown(name)} is no name that a file can have") from None
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise OutsideError(f"{shown(name)} has a control character")
    return name


def shown(name: object) -> str:
    """A name for a message: its start, escaped."""
    text = ascii(name if isinstance(name, str | int | float | None) else type(name).__name__)
    return text if len(text) <= 80 else f"{text[:77]}…"


def beneath(root: Path, *names: object) -> Path:
    """The path of a name below `root`, which need not exist. OutsideError if it leads out, by its text or through a symbolic link.

    A folder that is swapped for a link after the call is not noticed. What is read is opened by `open_beneath`, which leaves no
    such moment; what is written takes its name by a rename, which replaces a link and does not follow it.
    """
    name = "/".join(relative(part) for part in names)
    try:
        folder = os.open(root, _LOOK | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in _ABSENT:
            return root / name
        raise
    try:
        _look(folder, name)
    except OSError as error:
        if error.errno in _OUT:
            raise _out(root, name) from error
        raise OSError(error.errno, error.strerror, str(root / name)) from error
    finally:
        os.close(folder)
    return root / name


def moved(root: Path, name: object) -> Path | None:
    """Where the folder `name` of a storage was moved to, if a link in its place says so; else None.

    The link lies in `root` itself, and leads to a folder of the same name; both belong to the owner of `root`. So it was made by who could
    as well have put the folder there, and it cannot give a run's name to another folder: not to that of a user's keys, even where
    the storage is a copy that a stranger has made. What lies below is resolved beneath the folder to which it leads.
    """
    link = root / component(name)
    try:
        if not stat.S_ISLNK(link.lstat().st_mode):
            return None
        target = link.resolve(strict=True)
        owners = {link.lstat().st_uid, root.stat().st_uid, target.stat().st_uid}
    except (OSError, RuntimeError):  # it is not there, or links in a circle
        return None
    return target if target.is_dir() and target.name == name and len(owners) == 1 else None


def _look(folder: int, name: str) -> None:
    """Resolve as much of a name as exists. OSError (one of `_OUT`) if that leads out of the folder."""
    while name:
        try:
            os.close(_resolved(folder, name, _LOOK, 0))
            return
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
        _refuse_dangling(folder, name)
        name = name.rpartition("/")[0]


def _refuse_dangling(folder: int, name: str) -> None:
    """A link to what does not exist may lead out as soon as it does."""
    above, _, last = name.rpartition("/")
    try:
        parent = _resolved(folder, above or ".", _LOOK | os.O_DIRECTORY, 0)
    except OSError as error:
        if error.errno in _ABSENT:
            return
        raise
    try:
        if _is_link(parent, last):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
    finally:
        os.close(parent)


def open_beneath(root: Path, name: object, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of the file or folder `name` below `root`, which is resolved without leaving `root`.

    OutsideError for a name that leads out, FileNotFoundError and other OSErrors as `os.open`; OSError (EINVAL) for what is
    neither a file nor a folder.
    """
    text = relative(name)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = _resolved(folder, text, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in _OUT:
            raise _out(root, text) from error
        raise OSError(error.errno, error.strerror, str(root / text)) from error
    finally:
        os.close(folder)
    return plain_file(descriptor, root / text)


def read_beneath(root: Path, name: object, most: int) -> bytes:
    """The content of a file below `root`, of at most `most` bytes. OutsideError, OSError, or ValueError for a larger one."""
    return _content(open_beneath(root, name), most)


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a file that a person has named, or whose name is fixed: of at most `most` bytes, else ValueError. OSError as `open`."""
    return _content(plain_file(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), path), most)


def _content(descriptor: int, most: int) -> bytes:
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise ValueError(f"it has {size} bytes, and at most {most} are read")
        return file.read(size)


def plain_file(descriptor: int, path: Path) -> int:
    """The descriptor, if it is a file's or a folder's; else it is closed, with OSError."""
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, wanted a file", str(path))


def _out(root: Path, name: str) -> OutsideError:
    return OutsideError(f"{shown(name)} leads out of {str(root)!r} by a symbolic link")


# --- resolution ------------------------------------------------------------------------------------------------------


class _How(ctypes.Structure):
    """The kernel's `struct open_how`."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _resolved(folder: int, name: str, flags: int, mode: int) -> int:
    if _has_openat2():
        return _openat2(folder, name, flags, mode)
    return _walked(folder, name, flags, mode)


def _openat2(folder: int, name: str, flags: int, mode: int) -> int:
    how = _How(flags, mode if flags & os.O_CREAT else 0, _RESOLVE)
    for _ in range(_LOOKS):
        descriptor = _libc.syscall(
            ctypes.c_long(_OPENAT2),
            ctypes.c_int(folder),
            ctypes.c_char_p(os.fsencode(name)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if descriptor >= 0:
            return int(descriptor)
        number = ctypes.get_errno()
        if number != errno.EAGAIN:
            break
    raise OSError(number, os.strerror(number), name)


_libc = ctypes.CDLL(None, use_errno=True)
_known: list[bool] = []  # whether this kernel has openat2, once it was asked


def _has_openat2() -> bool:
    if not _known:
        _known.append(sys.platform == "linux" and platform.machine() != "alpha" and _answers())
    return _known[0]


def _answers() -> bool:
    root = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.close(_openat2(root, ".", os.O_RDONLY | os.O_CLOEXEC, 0))
    except OSError as error:
        if error.errno in _UNKNOWN:
            return False
        raise
    finally:
        os.close(root)
    return True


def _walked(folder: int, name: str, flags: int, mode: int) -> int:
    """The same without `openat2`: each part is opened in the folder before it, and no symbolic link is followed."""
    *parts, last = name.split("/")
    current = os.dup(folder)
    try:
        for part in parts:
            following = _entered(current, part)
            os.close(current)
            current = following
        if last != "." and _is_link(current, last):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
        return os.open(last, flags | os.O_NOFOLLOW, mode, dir_fd=current)
    finally:
        os.close(current)


def _entered(folder: int, part: str) -> int:
    try:
        return os.open(part, _LOOK | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError as error:
        if _is_link(folder, part):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), part) from error
        raise


def _is_link(folder: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False
