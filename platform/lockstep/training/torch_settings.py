"""The settings of torch by which it computes other bits from the same program: told for the identity, and held still while a run trains.

A checkpoint has none of them. So what the job sets while it is imported, made or asked for its model holds for the whole run; what `loss` sets ends
with its micro-batch, as each one begins alike; and what a hook sets between steps is refused: a resumed run would not have it.
"""

from __future__ import annotations

import locale
import os
import sys
from codecs import lookup
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from lockstep.training import problems
from lockstep.training.worker_environment import kernel_variables

_C: Any = torch._C
_TINY, _HALF = 5e-324, 0.5 + 0.5


class Setting(NamedTuple):
    """One setting: the name by which a job sets it, how it is read, and how it is put back."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _flushes_denormals() -> bool:
    # There is no way to ask: torch's switch is one of the processor's, for each thread.
    return _TINY * _HALF == 0.0


def _fp32(backend: str, operator: str) -> Setting:
    """The precision of a backend's products of fp32 numbers, as every one of torch's ways to set it ends there."""
    return Setting(
        f"torch.backends.{'cudnn' if backend == 'cuda' and operator != 'matmul' else backend}.{operator}.fp32_precision",
        partial(_C._get_fp32_precision_getter, backend, operator),
        partial(_C._set_fp32_precision_setter, backend, operator),
    )


_NEWER_WAY = "other"
"""What torch's older setting of the precision of products is where a newer one was used, which tells it by the backend."""


def refuses_nondeterministic() -> bool:
    """Whether torch refuses an operator that is not deterministic. With `warn_only` it does not."""
    return bool(_C._get_deterministic_algorithms() and not _C._get_deterministic_algorithms_warn_only())


def _matmul_precision() -> str:
    try:
        return str(_C._get_float32_matmul_precision())
    except RuntimeError:  # it was set in torch's newer way, for some backends
        return _NEWER_WAY


def _set_matmul_precision(value: str) -> None:
    if value != _NEWER_WAY:
        _C._set_float32_matmul_precision(value)  # before those of the backends, which it sets as well


def _autocast(kind: str) -> tuple[Setting, Setting]:
    """Whether products are cast on a kind of device outside of any `with torch.autocast`, and to which type within one that names none."""
    return (
        Setting(
            f"torch.set_autocast_enabled.{kind}",
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
        ),
        Setting(
            f"torch.set_autocast_dtype.{kind}",
            partial(torch.get_autocast_dtype, kind),
            partial(torch.set_autocast_dtype, kind),
        ),
    )


_PATHS: Any = torch.backends.opt_einsum
_has_paths, _path_strategy = _PATHS._get_enabled, _PATHS._get_strategy
"""Read without the module's properties, which take 2 µs each."""


def _einsum_paths() -> tuple[bool, Any]:
    # Products of three and more are taken from left to right where opt_einsum is not installed.
    return _has_paths(), _path_strategy()


def _set_einsum_paths(value: tuple[bool, Any]) -> None:
    enabled, strategy = value
    if strategy is not None:  # it is installed, and takes a strategy while it is enabled
        _PATHS.enabled, _PATHS.strategy = True, strategy
    _PATHS.enabled = enabled


_EVERYWHERE = (
    Setting("torch.set_float32_matmul_precision", _matmul_precision, _set_matmul_precision),
    Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("torch.set_flush_denormal", _flushes_denormals, torch.set_flush_denormal),
    Setting("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads),
    Setting(
        "torch.use_deterministic_algorithms",
        refuses_nondeterministic,
        torch.use_deterministic_algorithms,
    ),
    Setting("torch.backends.cudnn.benchmark", _C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    Setting("torch.backends.cuda.enable_flash_sdp", _C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    Setting("torch.backends.cuda.enable_math_sdp", _C._get_math_sdp_enabled, _C._set_sdp_use_math),
    Setting(
        "torch.backends.cuda.enable_mem_efficient_sdp",
        _C._get_mem_efficient_sdp_enabled,
        _C._set_sdp_use_mem_efficient,
    ),
    Setting(
        "torch.backends.mha.set_fastpath_enabled",
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    Setting("torch.backends.opt_einsum", _einsum_paths, _set_einsum_paths),
    *_autocast("cpu"),
)

_OF_CPU = (
    Setting("torch.backends.mkldnn.enabled", _C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    Setting(
        "torch.backends.mkldnn.deterministic", _C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic
    ),
    Setting("torch.backends.nnpack", _C._get_nnpack_enabled, _C._set_nnpack_enabled),
    Setting("torch.backends.quantized.engine", _C._get_qengine, _C._set_qengine),
    *(_fp32("mkldnn", operator) for operator in ("matmul", "conv", "rnn")),
)

_OF_CUDA = (
    Setting("torch.backends.cudnn.enabled", _C._get_cudnn_enabled, _C._set_cudnn_enabled),
    Setting("torch.backends.cudnn.deterministic", _C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    Setting("torch.backends.cuda.enable_cudnn_sdp", _C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    Setting(
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
        _C._get_math_sdp_allow_fp16_bf16_reduction,
        _C._set_math_sdp_allow_fp16_bf16_reduction,
    ),
    Setting(
        "torch.backends.cuda.matmul.allow_fp16_accumulation",
        _C._get_cublas_allow_fp16_accumulation,
        _C._set_cublas_allow_fp16_accumulation,
    ),
    Setting(
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda value: _C._set_cublas_allow_fp16_reduced_precision_reduction(*value),
    ),
    Setting(
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda value: _C._set_cublas_allow_bf16_reduced_precision_reduction(*value),
    ),
    Setting(
        "torch.backends.cuda.preferred_blas_library",
        _C._get_blas_preferred_backend,
        _C._set_blas_preferred_backend,
    ),
    Setting(
        "torch.backends.cuda.preferred_linalg_library",
        _C._get_linalg_preferred_backend,
        _C._set_linalg_preferred_backend,
    ),
    *(_fp32("cuda", operator) for operator in ("matmul", "conv", "rnn")),
    *_autocast("cuda"),
)


def settings_of(device: torch.device) -> tuple[Setting, ...]:
    """Those that count for a kind of device."""
    return (*_EVERYWHERE, *(_OF_CUDA if device.type == "cuda" else _OF_CPU))


class Settings:
    """The settings of a device as a run's first step finds them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._settings = device, settings_of(device)
        self._reads = tuple(setting.read for setting in self._settings)
        self._first = [read() for read in self._reads]

    def put_back(self) -> None:
        """Undo what has changed. Where nothing has, it costs a microsecond."""
        if [read() for read in self._reads] != self._first:
            for setting, _, first in self._changes():
                setting.write(first)

    def check(self, where: str) -> None:
        """DeterminismError where the job has changed one `where`, between two steps."""
        if [read() for read in self._reads] == self._first:
            return
        changes = list(self._changes())
        setting, current, first = next((change for change in changes if change[1] != _NEWER_WAY), changes[0])
        raise problems.SETTING_CHANGED(where=where, name=setting.name, wanted=first, got=current)

    def _changes(self) -> Iterator[tuple[Setting, Any, Any]]:
        for setting, first in zip(self._settings, self._first, strict=True):
            if (current := setting.read()) != first:
                yield setting, current, first

    def fields(self) -> dict[str, Any]:
        """For the identity: these, the variables by which libraries choose their kernels, and how Python reads text and asserts."""
        values = {
            setting.name: value if isinstance(value, bool | int) else str(value)
            for setting, value in zip(self._settings, self._first, strict=True)
        }
        python = {
            "python.encoding": lookup(locale.getpreferredencoding(do_setlocale=False)).name,
            "python.optimize": sys.flags.optimize,
        }
        variables = kernel_variables(os.environ, cuda=self._device.type == "cuda")
        return {f"setting.{name}": value for name, value in {**values, **variables, **python}.items()}
