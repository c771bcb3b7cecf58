"""Functions of Python, torch and NumPy that something has replaced in this process, and other settings of a process that change what code gives.

Versions tell what a function does only as long as it is the library's own. One that belongs to the job is in the job's source. What replaces it
from elsewhere, such as a module that an interpreter imports as it starts, is in no field of the identity.
"""

from __future__ import annotations

import builtins
import decimal
import hashlib
import locale
import math
import os
import random
import site
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from lockstep.job.frames import is_installed, is_of_the_job
from lockstep.job.inputs.distributions import distribution_of
from lockstep.job.inputs.external_facts import REPLACED, STARTUP

Facts = dict[str, Any]


def process_facts() -> Facts:
    """The functions that were replaced, the lines that Python ran as it started, and how this process writes numbers."""
    return {**_replaced(), **_startup_lines(), **_number_forms()}


# --- functions ------------------------------------------------------------------------------------------------


def _holders() -> Iterator[tuple[str, Any]]:
    """What is looked through, by name: modules, and classes with their methods."""
    yield from (("builtins", builtins), ("math", math), ("random", random), ("torch", torch))
    yield from (("torch.Tensor", torch.Tensor), ("torch.nn.functional", torch.nn.functional))
    yield from (
        ("torch.linalg", torch.linalg),
        ("torch.nn.init", torch.nn.init),
        ("torch.nn.Module", torch.nn.Module),
    )
    yield from (("numpy", np), ("numpy.linalg", np.linalg), ("numpy.random", np.random))
    for module, base in (("torch.nn", torch.nn.Module), ("torch.optim", torch.optim.Optimizer)):
        kinds = list(vars(sys.modules[module]).items())
        yield from (
            (f"{module}.{name}", kind)
            for name, kind in kinds
            if isinstance(kind, type) and issubclass(kind, base)
        )


def _replaced() -> Facts:
    """What stands for each function that is not its library's own, by its name."""
    facts = Facts()
    for holder, namespace in _holders():
        for name, value in list(vars(namespace).items()):
            if (stand_in := _stand_in(holder, name, value)) is not None:
                facts[f"{REPLACED}{holder}.{name}"] = stand_in
    return facts


def _stand_in(holder: str, name: str, value: Any) -> str | None:
    """What stands for a function where it is another one than its name says: the file of its code, or its own name."""
    value = value.__func__ if isinstance(value, staticmethod | classmethod | MethodType) else value
    if isinstance(value, FunctionType):
        return _of_file(value)
    if isinstance(value, type):
        return _of_class(holder, name, value)
    if (
        isinstance(value, BuiltinFunctionType)
        and not name.startswith("_")
        and _plain(value.__name__) != _plain(name)
    ):
        return f"{value.__module__}.{value.__name__}"
    return None


def _plain(name: str) -> str:
    """A name without what libraries put around it: `linalg_inv` is `inv`, and `log_sigmoid` is `logsigmoid`."""
    return name.strip("_").removeprefix("linalg_").replace("_", "")


def _of_file(function: FunctionType) -> str | None:
    file = function.__code__.co_filename
    owner = _owner(file)
    return _code_digest(function, file) if owner is None else owner or None


@cache
def _owner(file: str) -> str | None:
    """The distribution whose code a file is, with its version; nothing for Python's, Lockstep's and the libraries' own. None where it has none."""
    if file.startswith("<") or not (is_of_the_job(file) or is_installed(Path(file))):
        return ""  # or code that was made when a library was imported
    owner = distribution_of(Path(file))
    if owner is not None:
        return "" if owner.name in _OF_LIBRARIES else f"{owner.name} {owner.version}"
    return None


_OF_LIBRARIES = frozenset({"torch", "numpy", "typing-extensions", "beartype", "ray"})
"""Distributions whose code is torch's or NumPy's own, of which every identity has the versions; and Ray, whose workers print to a log of theirs."""


def _code_digest(function: FunctionType, file: str) -> str:
    try:
        content = Path(file).read_bytes()
    except OSError:
        content = function.__code__.co_code
    return f"{Path(file).name} {hashlib.sha256(content).hexdigest()[:16]}"


def _of_class(holder: str, name: str, kind: type) -> str | None:
    """For `random.Random` and the like: a class of the same name from another module."""
    if (
        holder not in ("builtins", "random")
        or name.startswith("_")
        or kind.__module__ in ("builtins", "_random", "random")
    ):
        return None
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return None if file is None or not is_of_the_job(file) else f"{kind.__module__}.{kind.__qualname__}"


# --- what Python runs as it starts ------------------------------------------------------------------------------


def _startup_lines() -> Facts:
    """The sha256 of the lines that begin with `import` in each `.pth` file that no distribution has installed."""
    facts = Facts()
    for folder in _site_folders():
        for file in sorted(Path(folder).glob("*.pth")) if Path(folder).is_dir() else ():
            try:
                lines = [
                    line
                    for line in file.read_bytes().splitlines()
                    if line.startswith((b"import ", b"import\t"))
                ]
            except OSError:  # which Python could not read either
                continue
            if lines and not _is_known(file):
                facts[f"{STARTUP}{file.name}"] = hashlib.sha256(b"\n".join(lines)).hexdigest()[:16]
    return facts


def _site_folders() -> list[str]:
    """Where Python looks for `.pth` files."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return list(dict.fromkeys(map(os.path.abspath, folders)))


def _is_known(file: Path) -> bool:
    """Whether a distribution has installed a `.pth` file."""
    records = file.parent.glob("*.dist-info/RECORD")
    return any(f"{file.name}," in record.read_text(encoding="utf-8", errors="replace") for record in records)


# --- how numbers are written ------------------------------------------------------------------------------------


def _number_forms() -> Facts:
    """The settings by which a number becomes another text, or another number: print options, decimal's context, and the locale as it is set."""
    context = decimal.getcontext()
    numpy_options = {name: value for name, value in np.get_printoptions().items() if name != "override_repr"}
    torch_options = vars(torch._tensor_str.PRINT_OPTS)
    categories = ("LC_NUMERIC", "LC_COLLATE", "LC_TIME", "LC_MONETARY")
    return {
        "numpy's print options": str(sorted(numpy_options.items(), key=str)),
        "torch's print options": str(sorted(torch_options.items())),
        "decimal's context": f"{context.prec} {context.rounding}",
        **{f"locale {name}": locale.setlocale(getattr(locale, name)) for name in categories},
    }
