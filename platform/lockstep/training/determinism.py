"""What `determinism: strict` sets in a process, and the numerics probe that tells one machine's bits from another's."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lockstep.threads import library_threads, one_library_thread, openmp_limit, start_autograd
from lockstep.training import problems
from lockstep.training.deferred_dynamo import current_stance, defer_compiler, functions_as_written
from lockstep.training.torch_settings import Settings, refuses_nondeterministic
from lockstep.training.worker_environment import WORKER_ENVIRONMENT, hashes_otherwise


@contextmanager
def determinism(kind: Literal["strict", "fast"], threads: int) -> Iterator[None]:
    """Put this process into the given determinism and number of intra-op threads; restore both on the way out.

    What a job sets for its process (`settings`) is restored as well: a trial of a sweep may follow there.

    Under strict the libraries beside torch have one thread: what a job computes with NumPy depends on no number of cores.

    Raises DeterminismError where python hashes strings in another way than with PYTHONHASHSEED=0.
    """
    if kind == "strict" and hashes_otherwise():
        seed = os.environ.get("PYTHONHASHSEED", "random")
        raise problems.HASH_SEED(got=seed)
    if threads > (limit := openmp_limit()):
        # oneDNN counts on every thread that it asks for: with fewer, its first convolution waits for the others for ever.
        raise problems.THREADS(got=threads, wanted=limit)
    for name, value in WORKER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    defer_compiler()
    if not torch.cuda.is_available():
        start_autograd()  # so that a rehearsal can be forked
    cudnn = torch.backends.cudnn
    previous = (
        torch.get_num_threads(),
        cudnn.benchmark,
    )
    settings = [Settings(torch.device(kind)) for kind in ("cpu", "cuda")]
    # It would compile a function of TorchScript for what its first calls were, and so give other bits from the second one on.
    profiles: bool = torch._C._jit_set_profiling_executor(kind == "fast")
    try:
        with (
            one_library_thread() if kind == "strict" else nullcontext(),
            deterministic_algorithms(kind == "strict"),
            functions_as_written(kind == "strict"),
        ):
            torch.set_num_threads(threads)
            cudnn.benchmark = kind == "fast"
            if kind == "strict":
                # Attention leaves it, for other bits, where a module has a hook or a parameter is shared out: also where that only watches.
                torch.backends.mha.set_fastpath_enabled(False)
            # Filling every new tensor with NaN costs more than it finds; the rehearsal turns it on for one micro-batch.
            with filled_memory(False):
                yield
    finally:
        torch._C._jit_set_profiling_executor(profiles)
        torch.set_num_threads(previous[0])
        cudnn.benchmark = previous[1]
        for device_settings in settings:
            device_settings.put_back()


_OF_INDUCTOR = "TORCHINDUCTOR_DETERMINISTIC"
"""What the compiler reads as it is imported."""


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """What `torch.use_deterministic_algorithms` does, for a while. That imports the compiler to tell it: here it is told when it is imported."""
    mode, variable = torch.get_deterministic_debug_mode(), os.environ.get(_OF_INDUCTOR)
    inductor = sys.modules.get("torch._inductor.config")
    compiled = bool(mode) if inductor is None else inductor.deterministic
    _set_deterministic("error" if on else "default", str(int(on)), compiled=on)
    try:
        yield
    finally:
        _set_deterministic(mode, variable, compiled=compiled)


def _set_deterministic(mode: int | str, variable: str | None, *, compiled: bool) -> None:
    torch.set_deterministic_debug_mode(mode)
    os.environ.pop(_OF_INDUCTOR, None)
    os.environ |= {} if variable is None else {_OF_INDUCTOR: variable}
    if (inductor := sys.modules.get("torch._inductor.config")) is not None:
        inductor.deterministic = compiled  # type: ignore[attr-defined]


def check_kept(kind: Literal["strict", "fast"], threads: int) -> None:
    """DeterminismError where the job's own code has changed what `determinism` set: the bits would differ from machine to machine."""
    settings = {
        "torch.set_num_threads": (torch.get_num_threads(), threads, "the spec's threads"),
        "torch.use_deterministic_algorithms": (refuses_nondeterministic(), True, "strict"),
        "torch.backends.mha.set_fastpath_enabled": (
            torch.backends.mha.get_fastpath_enabled(),
            False,
            "strict",
        ),
        "torch.compiler.set_stance": (current_stance(), "force_eager", "strict"),
        "torch.backends.cudnn.benchmark": (torch.backends.cudnn.benchmark, False, "strict"),
        "the number of threads of NumPy's BLAS": (library_threads(), 1, "whatever the machine"),
    }
    for name, (value, wanted, why) in settings.items() if kind == "strict" else ():
        if value != wanted:
            raise problems.JOB_SETTING(name=name, got=value, wanted=wanted, reason=why)


@contextmanager
def filled_memory(on: bool) -> Iterator[None]:
    """Turn filling of newly allocated tensors with NaN on or off inside the block (strict determinism only)."""
    settings: Any = torch.utils.deterministic
    previous = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = on
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = previous


def numerics_probe(device: torch.device) -> str:
    """The first 16 hex digits of a sha256 over the results of some fifty kernels, forward and backward, on fixed inputs. Takes tens of ms.

    The kernels are torch's: `numpy_probe` is that of NumPy. Two processes with equal probes can be expected to give the same bits for the same program. Two whose probes differ
    (another instruction set, library build or number of threads) certainly do not.
    """
    digest = hashlib.sha256()
    for name, result in _probe_results(device):
        values = result.detach().float().cpu().contiguous()
        digest.update(name.encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def numpy_probe() -> str:
    """The same of NumPy: products of its BLAS, decompositions, functions and sums, by which data and metrics may be computed. Takes a few ms.

    Python's own functions are the C library's, which differs between systems with one NumPy: schedules, Adam's bias correction and jobs compute with them.
    """
    digest = hashlib.sha256()
    for name, result in _numpy_results():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(result).data)
    return digest.hexdigest()[:16]


def _numpy_results() -> Iterator[tuple[str, NDArray[Any]]]:
    kinds: tuple[Any, ...] = (np.float32, np.float64)
    for kind in kinds:
        matrix, square, vector = (
            _values(torch.device("cpu"), *shape).numpy().astype(kind)
            for shape in ((500, 300), (24, 24), (500,))
        )
        yield "dot", np.dot(vector, vector)
        yield "matrix by vector", matrix.T @ vector
        yield "vector by rows", matrix @ vector[:300]
        yield "matrix by matrix", matrix[:65, :127] @ matrix[100:227, :33]
        yield "matrix by itself", matrix.T @ matrix
        yield "singular values", np.linalg.svd(square, compute_uv=False)
        yield "solution", np.linalg.solve(square + 24 * np.eye(24, dtype=kind), vector[:24])
        yield "einsum", np.einsum("ij,ij->j", matrix, matrix)
        for function in (np.exp, np.log1p, np.sin, np.cos, np.tanh, np.sqrt):
            yield function.__name__, function(np.abs(vector))
        for reduce in (np.sum, np.mean, np.var):
            yield reduce.__name__, reduce(matrix)
            yield f"{reduce.__name__} of columns", reduce(matrix, axis=0)
        yield "fft", np.fft.rfft(vector)
    numbers = [float(number) for number in np.abs(_values(torch.device("cpu"), 64).numpy()) + 1]
    for of_python in (*_OF_LIBM, lambda x: x**-0.7, lambda x: 0.999**x):
        yield "python", np.array([of_python(number) for number in numbers])


_OF_LIBM = tuple(
    getattr(math, name)
    for name in (
        *("exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "atan", "sinh", "tanh"),
        *("erf", "erfc", "gamma", "lgamma", "cbrt"),
    )
)
"""Looked up once: a function that a job replaces in `math` is no other machine."""


def _values(device: torch.device, *shape: int) -> Tensor:
    """Irregular numbers in about [-1, 1], made on the CPU from whole numbers and without any generator."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(count, dtype=torch.int64) * 2654435761 + 12345) % 65521
    return (mixed.float() / 32760.5 - 1.0).reshape(shape).to(device)


def _probe_results(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    x = _values(device, 33, 127)
    for rows, inner, columns in ((1, 64, 10), (7, 100, 33), (32, 256, 64), (65, 31, 17), (128, 384, 128)):
        a, b = _values(device, rows, inner), _values(device, columns, inner)
        yield f"linear {rows}x{inner}x{columns}", F.linear(a, b)
        yield f"linear bf16 {rows}x{inner}x{columns}", F.linear(a.bfloat16(), b.bfloat16())
    yield "bmm", torch.bmm(_values(device, 4, 9, 21), _values(device, 4, 21, 13))
    images = _values(device, 3, 5, 12, 12)
    for stride in (1, 2):
        yield f"conv {stride}", F.conv2d(images, _values(device, 8, 5, 3, 3), stride=stride, padding=1)
    heads = _values(device, 2, 3, 17, 16)
    yield "attention", F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    pointwise: tuple[Callable[[Tensor], Tensor], ...] = (
        torch.exp, torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.erf, torch.rsqrt, torch.log1p,
        F.gelu, F.silu, F.softplus, torch.sqrt, torch.reciprocal,
    )  # fmt: skip
    for function in pointwise:
        yield function.__name__, function(x.abs() + 0.01)
    reductions: tuple[Callable[[Tensor], Tensor], ...] = (
        torch.sum, torch.mean, torch.var, torch.linalg.vector_norm, torch.prod,
    )  # fmt: skip
    for reduce in reductions:
        yield reduce.__name__, reduce(x)
    yield "sum rows", x.sum(0)
    if device.type == "cpu":
        yield "cumsum", x.cumsum(1)  # on CUDA it has no deterministic kernel, and raises under strict
    yield "softmax", F.softmax(x, 1)
    yield "log softmax", F.log_softmax(x, 1)
    yield "logsumexp", x.logsumexp(1)
    yield "layer norm", F.layer_norm(x, (127,))
    yield "batch norm", F.batch_norm(images, None, None, training=True)
    labels = torch.arange(33, device=device) % 127
    yield "cross entropy", F.cross_entropy(x, labels)
    if device.type == "cuda":
        yield from _reduced_precision(device)
    with torch.enable_grad():
        yield from _gradients(device, x, images, heads, labels)


def _reduced_precision(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """What has kernels of its own in bf16 and fp16 on CUDA: attention, and products over a long dimension, which may be split."""
    for dtype in (torch.bfloat16, torch.float16):
        yield f"linear {dtype}", F.linear(*(_values(device, rows, 16384).to(dtype) for rows in (16, 64)))
        heads = _values(device, 2, 3, 80, 64).to(dtype).requires_grad_()
        with torch.enable_grad():
            result = F.scaled_dot_product_attention(heads, heads.flip(2), heads, is_causal=True)
        yield f"attention {dtype}", result
        (gradient,) = torch.autograd.grad(result, heads, _values(device, *result.shape).to(dtype))
        yield f"gradient of attention {dtype}", gradient


def _gradients(
    device: torch.device, x: Tensor, images: Tensor, heads: Tensor, labels: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Gradients of some operators: backward has kernels of its own, which sum over other dimensions."""
    words = _values(device, 41, 24)
    calls: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "linear": (F.linear, (x, _values(device, 64, 127), _values(device, 64))),
        "conv": (partial(F.conv2d, padding=1), (images, _values(device, 8, 5, 3, 3))),
        "attention": (partial(F.scaled_dot_product_attention, is_causal=True), (heads, heads.flip(2), heads)),
        "embedding": (lambda table: F.embedding((labels * 7) % 5, table), (words,)),
        "layer norm": (partial(F.layer_norm, normalized_shape=(127,)), (x,)),
        "batch norm": (lambda a: F.batch_norm(a, None, None, training=True), (images,)),
        "cross entropy": (lambda a: F.cross_entropy(a, labels), (x,)),
        "gelu": (F.gelu, (x,)),
    }
    for name, (function, inputs) in calls.items():
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        result = function(*leaves)
        # A sum of products has these values as the gradient of `result`. Given to `grad`, they would make torch import its symbolic shapes.
        gradients = torch.autograd.grad((result * _values(device, *result.shape)).sum(), leaves)
        for i, gradient in enumerate(gradients):
            yield f"gradient {i} of {name}", gradient
