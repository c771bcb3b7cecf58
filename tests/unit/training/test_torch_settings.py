"""Torch's settings as a run's first step finds them: each one is seen, told for the identity, and put back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lockstep.training import problems
from lockstep.training.torch_settings import Settings
from lockstep.training.worker_environment import kernel_variables
from tests.raised import raises

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKENDS, MATMUL = torch.backends, torch.backends.cuda.matmul


def attribute(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


CHANGES: dict[str, tuple[torch.device, Callable[[Any], Any], Any]] = {
    "torch.set_float32_matmul_precision": (CPU, torch.set_float32_matmul_precision, "medium"),
    "torch.set_default_dtype": (CPU, torch.set_default_dtype, torch.float64),
    "torch.set_flush_denormal": (CPU, torch.set_flush_denormal, True),
    "torch.set_num_threads": (CPU, torch.set_num_threads, 3),
    "torch.use_deterministic_algorithms": (CPU, torch.use_deterministic_algorithms, True),
    "torch.backends.cudnn.benchmark": (CPU, attribute(BACKENDS.cudnn, "benchmark"), True),
    "torch.backends.cuda.enable_flash_sdp": (CPU, BACKENDS.cuda.enable_flash_sdp, False),
    "torch.backends.cuda.enable_math_sdp": (CPU, BACKENDS.cuda.enable_math_sdp, False),
    "torch.backends.cuda.enable_mem_efficient_sdp": (CPU, BACKENDS.cuda.enable_mem_efficient_sdp, False),
    "torch.backends.mha.set_fastpath_enabled": (CPU, BACKENDS.mha.set_fastpath_enabled, False),
    "torch.set_autocast_enabled.cpu": (CPU, partial(torch.set_autocast_enabled, "cpu"), True),
    "torch.set_autocast_dtype.cpu": (CPU, partial(torch.set_autocast_dtype, "cpu"), torch.float16),
    "torch.set_autocast_enabled.cuda": (CUDA, partial(torch.set_autocast_enabled, "cuda"), True),
    "torch.set_autocast_dtype.cuda": (CUDA, partial(torch.set_autocast_dtype, "cuda"), torch.bfloat16),
    "torch.backends.mkldnn.enabled": (CPU, torch._C._set_mkldnn_enabled, False),
    "torch.backends.mkldnn.deterministic": (CPU, attribute(BACKENDS.mkldnn, "deterministic"), True),
    "torch.backends.nnpack": (CPU, torch._C._set_nnpack_enabled, False),
    "torch.backends.mkldnn.matmul.fp32_precision": (CPU, attribute(BACKENDS.mkldnn.matmul, "fp32_precision"), "bf16"),
    "torch.backends.mkldnn.conv.fp32_precision": (CPU, attribute(BACKENDS.mkldnn.conv, "fp32_precision"), "bf16"),
    "torch.backends.mkldnn.rnn.fp32_precision": (CPU, attribute(BACKENDS.mkldnn.rnn, "fp32_precision"), "bf16"),
    "torch.backends.cudnn.enabled": (CUDA, attribute(BACKENDS.cudnn, "enabled"), False),
    "torch.backends.cudnn.deterministic": (CUDA, attribute(BACKENDS.cudnn, "deterministic"), True),
    "torch.backends.cudnn.conv.fp32_precision": (CUDA, attribute(BACKENDS.cudnn.conv, "fp32_precision"), "ieee"),
    "torch.backends.cudnn.rnn.fp32_precision": (CUDA, attribute(BACKENDS.cudnn.rnn, "fp32_precision"), "ieee"),
    "torch.backends.cuda.matmul.fp32_precision": (CUDA, attribute(MATMUL, "fp32_precision"), "tf32"),
    "torch.backends.cuda.enable_cudnn_sdp": (CUDA, BACKENDS.cuda.enable_cudnn_sdp, False),
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": (CUDA, BACKENDS.cuda.allow_fp16_bf16_reduction_math_sdp, True),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": (CUDA, attribute(MATMUL, "allow_fp16_accumulation"), True),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (CUDA, attribute(MATMUL, "allow_fp16_reduced_precision_reduction"), (False, False)),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (CUDA, attribute(MATMUL, "allow_bf16_reduced_precision_reduction"), (False, False)),
}  # fmt: skip
"""By the name by which a setting is told: for which device it counts, how a job changes it, and to what."""


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = [Settings(CPU), Settings(CUDA)]
    yield
    for settings in before:
        settings.put_back()


def test_every_setting_of_the_table_is_tried() -> None:
    """But those of which a machine without such a device, or without opt_einsum, has one value alone."""
    names = {setting.name for device in (CPU, CUDA) for setting in Settings(device)._settings}
    assert names - CHANGES.keys() == {
        "torch.backends.quantized.engine", "torch.backends.cuda.preferred_blas_library", "torch.backends.cuda.preferred_linalg_library",
        "torch.backends.opt_einsum",
    }  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_told_refused_by_name_and_put_back(name: str) -> None:
    device, change, value = CHANGES[name]
    settings = Settings(device)
    before = settings.fields()
    settings.check("after nothing")
    change(value)
    assert Settings(device).fields()[f"setting.{name}"] != before[f"setting.{name}"]
    with raises(problems.SETTING_CHANGED, where="after step 1", name=name) as refused:
        settings.check("after step 1")
    assert str(refused.value).endswith(
        "set it where the job is imported or in model(), for the whole run, or in loss, for the micro-batch"
    )
    settings.put_back()
    settings.check("now")
    assert Settings(device).fields() == before


def test_variables_by_which_libraries_choose_kernels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of threads, which a run sets, of logs and of memory are not: a resume elsewhere may have others."""
    deciding = {
        "MKL_CBWR": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "OPENBLAS_CORETYPE": "Haswell", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "ATEN_CPU_CAPABILITY": "avx2", "NPY_DISABLE_CPU_FEATURES": "AVX2", "OMP_THREAD_LIMIT": "1",
        "OMP_DYNAMIC": "true", "KMP_DETERMINISTIC_REDUCTION": "1", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    }  # fmt: skip
    others = {
        "MKL_NUM_THREADS": "4", "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4", "KMP_BLOCKTIME": "0", "OMP_PROC_BIND": "true",
        "OMP_WAIT_POLICY": "PASSIVE", "ONEDNN_VERBOSE": "1", "PYTORCH_CUDA_ALLOC_CONF": "x", "TORCH_HOME": "/x", "TORCH_LOGS": "all",
    }  # fmt: skip
    cuda = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NVIDIA_TF32_OVERRIDE": "0"}
    everything = {**deciding, **others, **cuda}
    assert kernel_variables(everything, cuda=False) == deciding
    assert kernel_variables(everything, cuda=True) == {**deciding, **cuda}
    tunables = "glibc.malloc.arena_max=1:glibc.cpu.hwcaps=-AVX2"
    assert kernel_variables({"GLIBC_TUNABLES": tunables}, cuda=False) == {
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2"
    }
    for name in kernel_variables(dict(os.environ), cuda=True):  # this machine's own
        monkeypatch.delenv(name)
    for name, value in deciding.items():
        before = Settings(CPU).fields()
        monkeypatch.setenv(name, value)
        assert Settings(CPU).fields() != before, name
        assert os.environ[name] == value
