"""Lays out the file system of a process in namespaces of its own, gives up every right to change it, and becomes the command.

It is run by its path, without Lockstep: `python -I -S sandbox_entry.py LAYOUT COMMAND…`; `sandbox` writes the layout, a JSON object.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys

_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _MOVE, _REC = 1, 2, 4, 32, 4096, 8192, 16384
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
_CAPBSET_DROP, _SET_NO_NEW_PRIVS, _CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL = 24, 38, 47, 4
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def main(layout: str, command: list[str]) -> None:
    """Does not return. OSError where the system refuses a part of it: nothing runs then."""
    document = json.loads(layout)
    _devices(document["devices"])
    aside = _bound_aside(document["needed"])
    for path in document["covered"]:
        _tmpfs(path)
    for path, source in zip(document["needed"], aside, strict=True):
        _bind_back(path, source)
    for path in document["hidden"]:
        if os.path.isdir(path):  # noqa: PTH112
            _tmpfs(path)
        elif os.path.lexists(path):  # else it is covered already
            _mount("/dev/null", path, flags=_BIND)
    _read_only("/")
    for path in (*document["covered"], "/dev"):
        _writable(path)
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV)
    _loopback()
    with open("/proc/sys/user/max_user_namespaces", "w") as file:  # noqa: PTH123
        file.write("0")  # in one of its own a process could mount again
    os.chdir(document["folder"])
    _give_up_rights()
    os.execv(command[0], command)


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _mount(
    source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None
) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _checked(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def _tmpfs(path: str) -> None:
    _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, "mode=0755")


def _devices(paths: list[str]) -> None:
    """A /dev with these devices alone: a terminal of the user's could be written to."""
    new = "/dev/shm"
    _tmpfs(new)
    for path in paths:
        target = new + path.removeprefix("/dev")
        if os.path.isdir(path):  # noqa: PTH112
            os.makedirs(target)  # noqa: PTH103
        else:
            open(target, "x").close()  # noqa: PTH123
        _mount(path, target, flags=_BIND | _REC)
    for name, leads in (
        ("fd", "self/fd"),
        ("stdin", "self/fd/0"),
        ("stdout", "self/fd/1"),
        ("stderr", "self/fd/2"),
    ):
        os.symlink(f"/proc/{leads}", f"{new}/{name}")  # noqa: PTH211
    os.mkdir(f"{new}/shm")  # noqa: PTH102
    _mount(new, "/dev", flags=_MOVE)


def _bound_aside(paths: list[str]) -> list[int]:
    """The needed files and folders, opened before what lies above them is covered."""
    return [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths]


def _bind_back(path: str, source: int) -> None:
    """Bind what was opened to its own path again."""
    if not os.path.lexists(path):
        opened = f"/proc/self/fd/{source}"
        if os.path.isdir(opened):  # noqa: PTH112
            os.makedirs(path)  # noqa: PTH103
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            open(path, "x").close()  # noqa: PTH123
        _mount(opened, path, flags=_BIND | _REC)
    os.close(source)


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def _set_attributes(path: str, attributes: _Attributes, flags: int) -> None:
    done = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _checked(done, f"mount_setattr {path}")


def _read_only(path: str) -> None:
    _set_attributes(path, _Attributes(_ATTR_RDONLY, 0, 0, 0), _AT_RECURSIVE)


def _writable(path: str) -> None:
    _set_attributes(path, _Attributes(0, _ATTR_RDONLY, 0, 0), 0)


def _loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        _, flags, _ = struct.unpack("16sH14s", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | _IFF_UP, b""))


def _give_up_rights() -> None:
    """No capability is left after the command has started, and none can be had again."""
    _checked(_libc.prctl(_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl")
    with open("/proc/sys/kernel/cap_last_cap") as file:  # noqa: PTH123
        last = int(file.read())
    for capability in range(last + 1):
        _checked(_libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0), "prctl")
    _checked(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
