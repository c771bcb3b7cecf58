"""A process of a stranger's code confined by what the system has: bubblewrap, or the namespaces that util-linux's `unshare` makes.

Inside, the process sees itself and what it starts, and no other process. It has no network but a loopback of its own, no
capability, a file system that it can only read, and empty folders of its own where others have sockets and temporary
files. What it is judged by is not there. Its kernel is the machine's: a sandbox is no virtual machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.errors import first_line
from lockstep.proof import problems, sandbox_entry
from lockstep.record.redaction import redacted_variables

ROOT = Path(__file__).parents[2]
"""Where Lockstep is imported from."""

COVERED = ("/tmp", "/var/tmp", "/run", "/dev/shm")
"""Folders that are empty inside, but for what is needed: sockets of other programs are in them."""

DEVICES = ("null", "zero", "full", "random", "urandom")
"""What of /dev is there, beside accelerators."""

_ACCELERATORS = ("nvidia*", "dri", "kfd")

_SOCKETS = (
    "SSH_AUTH_SOCK",
    "DBUS_SESSION_BUS_ADDRESS",
    "XDG_RUNTIME_DIR",
    "GPG_AGENT_INFO",
    "DISPLAY",
    "WAYLAND_DISPLAY",
)
"""Variables that lead to other programs of the user."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What a confined process sees besides the machine's files. `hidden` is not there, also where it lies in a folder that is `needed`."""

    hidden: Sequence[Path] = ()
    needed: Sequence[Path] = ()

    def command(self, words: Sequence[str], folder: Path) -> list[str]:
        """The words of a command that runs `words` confined, in `folder`. SpecError where the system has nothing to confine it with."""
        layout = _Layout(
            [path for path in map(_real, COVERED) if path.is_dir()],
            [path for path in _needed([*self.needed, folder]) if path.exists()],
            [path for path in dict.fromkeys(map(_real, self.hidden)) if path.exists()],
            _real(folder),
        )
        return _backend()(layout, words)


@dataclass(frozen=True, slots=True)
class _Layout:
    covered: Sequence[Path]
    needed: Sequence[Path]
    hidden: Sequence[Path]
    folder: Path


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a confined process: those that hold no secret and lead to no other program."""
    safe = redacted_variables(variables)
    return {
        name: value
        for name, value in variables.items()
        if safe.get(name) == value and name not in _SOCKETS and not name.startswith("MLFLOW_")
    } | {"TMPDIR": "/tmp"}


def _real(path: Path | str) -> Path:
    return Path(os.path.realpath(path))


def _needed(extra: Iterable[Path]) -> list[Path]:
    """What has to be seen below the folders that are covered, outermost first: the interpreter and its paths, Lockstep, and what is given."""
    paths: list[Path | str] = [
        sys.prefix,
        sys.base_prefix,
        ROOT,
        *(folder for folder in sys.path if folder[:1] == "/"),
    ]
    covered = [_real(path) for path in COVERED]
    real = {_real(path) for path in (*paths, *extra)} - set(covered)
    return sorted(path for path in real if any(path.is_relative_to(folder) for folder in covered))


# --- what the system has ----------------------------------------------------------------------------------------

_Backend = Callable[[_Layout, Sequence[str]], list[str]]


@cache
def _backend() -> _Backend:
    """The first one that works here. SpecError where none does."""
    empty, refused = _Layout([], [], [], Path("/")), []
    for backend in (bubblewrap, namespaces):
        try:
            done = subprocess.run(
                backend(empty, [sys.executable, "-I", "-S", "-c", "pass"]),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=20,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            refused.append(f"{backend.__name__}: {first_line(error)}")
            continue
        if done.returncode == 0:
            return backend
        lines = done.stderr.strip().splitlines()
        refused.append(f"{backend.__name__}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    raise problems.NO_SANDBOX(got="; ".join(refused))


def bubblewrap(layout: _Layout, words: Sequence[str]) -> list[str]:
    """By bubblewrap, which Flatpak stands on."""
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("it is not installed")
    command = [program, "--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL"]
    command += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for device in _accelerators():
        command += ["--dev-bind", str(device), str(device)]
    for path in layout.covered:
        command += ["--tmpfs", str(path)]
    for path in layout.needed:
        command += ["--ro-bind", str(path), str(path)]
    for path in layout.hidden:
        command += ["--tmpfs", str(path)] if path.is_dir() else ["--ro-bind", os.devnull, str(path)]
    return [*command, "--chdir", str(layout.folder), "--", *words]


def namespaces(layout: _Layout, words: Sequence[str]) -> list[str]:
    """By namespaces of its own, in which `sandbox_entry` lays out the file system and gives up all rights to change it."""
    program = shutil.which("unshare")
    if program is None:
        raise FileNotFoundError("util-linux is not installed")
    document = {
        "covered": [str(path) for path in layout.covered],
        "needed": [str(path) for path in layout.needed],
        "hidden": [str(path) for path in layout.hidden],
        "devices": [*(f"/dev/{name}" for name in DEVICES), *map(str, _accelerators())],
        "folder": str(layout.folder),
    }
    kinds = [
        "--user",
        "--map-root-user",
        "--mount",
        "--net",
        "--ipc",
        "--uts",
        "--pid",
        "--fork",
        "--kill-child",
    ]
    enclosed = [sys.executable, "-I", "-S", str(sandbox_entry.__file__), json.dumps(document)]
    return [program, *kinds, "--", *enclosed, *words]


def _accelerators() -> list[Path]:
    return sorted(path for pattern in _ACCELERATORS for path in Path("/dev").glob(pattern))
