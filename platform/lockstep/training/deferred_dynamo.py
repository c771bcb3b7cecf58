"""Torch's compiler is imported once something is compiled, and not by every optimizer; what a job compiles by itself can be had run as it is written.

Torch's optimizers mark a few of their functions as not to be compiled, at their first call and in each step. The marks are the compiler's own, so
without this module every process of a run would import it: one to three seconds, and some 60 MB, for a run that compiles nothing.

Which program the compiler takes for a call follows from the calls that its process has made before: after a second shape it makes one for any shape, and
takes that for the first shape as well. A worker that is resumed, or has other micro-batches, would have other bits.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"

_MARK = "__dynamo_disable"
"""The attribute in which torch keeps what `disable` has returned for a function."""

_OF_COMPILED = "get_compiler_config"
"""An attribute of what `torch.compile` returns for a function."""

_OURS = "__lockstep"
"""An attribute of what `compiled` returns."""

_AS_WRITTEN, _COMPILED = "force_eager", "default"
"""The stances of the compiler that are taken here."""

_stance = _COMPILED
"""What the compiler is told as it is imported."""


class _DeferredCompiler(ModuleType):
    """Stands in for `torch._dynamo` until anything but the two marks is asked of it: then that is imported and takes its place."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__spec__ = spec = importlib.util.find_spec(_COMPILER)
        self.__file__ = None if spec is None else spec.origin
        self._unmarked = list[Callable[..., Any]]()
        self._lock = threading.RLock()

    def disable(self, function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        """Nothing is compiled yet: the function itself."""
        self._unmarked.append(function)
        return function

    def graph_break(self, *_: object, **__: object) -> None:
        """A mark that does nothing outside of a program that is being compiled."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # what looks through all modules asks for these
            raise AttributeError(name)
        return getattr(self._imported(), name)

    def _imported(self) -> ModuleType:
        with self._lock:
            if sys.modules.get(_COMPILER) is self:
                del sys.modules[_COMPILER]
                vars(torch).pop("_dynamo", None)
                for function in self._unmarked:
                    vars(function).pop(_MARK, None)
                importlib.import_module(_COMPILER)
                _take(_stance)
            return importlib.import_module(_COMPILER)


class _ImportedMeanwhile(MetaPathFinder, Loader):
    """Gives a module of the compiler as it is where the import of it has imported the compiler, and with that the module.

    `import torch._dynamo.exc` asks the stand-in for its path, and would then load a second `exc`, whose exceptions nobody raises.
    """

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        imported = sys.modules.get(name)
        if not name.startswith(f"{_COMPILER}.") or target is not None or imported is None:
            return None
        return ModuleSpec(name, self, loader_state=(imported, imported.__spec__))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = spec.loader_state[0]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It is loaded: only its own specification is put back. (Torch's modules of settings have kept theirs.)"""
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state[1]


def defer_compiler() -> None:
    """From here on import torch's compiler when it is used. Does nothing where it is imported already."""
    if _COMPILER not in sys.modules:
        torch._dynamo = sys.modules[_COMPILER] = _DeferredCompiler()
        sys.meta_path.insert(0, _ImportedMeanwhile())


@contextmanager
def functions_as_written(on: bool) -> Iterator[None]:
    """Run functions that are compiled as they are written inside the block, but for those of `functions_compiled`."""
    with _standing(_AS_WRITTEN if on else _stance):
        yield


@contextmanager
def functions_compiled() -> Iterator[None]:
    """Run functions that are compiled by their programs inside the block."""
    with _standing(_COMPILED):
        yield


@contextmanager
def _standing(stance: str) -> Iterator[None]:
    previous = _stance
    _take(stance)
    try:
        yield
    finally:
        _take(previous)


def _take(stance: str) -> None:
    global _stance  # as the compiler itself keeps it
    _stance = stance
    if _is_imported() and current_stance() != stance:  # torch refuses to set it while it compiles
        torch.compiler.set_stance(stance)


def current_stance() -> str:
    """That of the compiler, whoever has set it; before it is imported, the one that it will take."""
    return str(sys.modules["torch._dynamo.eval_frame"]._stance.stance) if _is_imported() else _stance


def _is_imported() -> bool:
    return _COMPILER in sys.modules and not isinstance(sys.modules[_COMPILER], _DeferredCompiler)


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """What `torch.compile` returns for a function with these settings, for Lockstep's own use: not one of `compiled_functions`."""
    program: Callable[..., Any] = torch.compile(function, **settings)
    vars(program)[_OURS] = True
    return program


def compiled_functions() -> list[str]:
    """The functions of this process for which the job has called `torch.compile`, by module and name. Takes half a second where the compiler is imported, else nothing."""
    if not _is_imported():
        return []
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    of_job = [each for each in functions if _OF_COMPILED in vars(each) and _OURS not in vars(each)]
    return sorted({f"{each.__module__}.{each.__qualname__}" for each in of_job})
