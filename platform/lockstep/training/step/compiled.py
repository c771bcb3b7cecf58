"""`compile`: a loss, or the units of its model, with their backward as programs that torch's inductor generates, for micro-batches of one shape.

Invariants: which program computes a micro-batch follows from that micro-batch and the spec, never from what its worker has computed
before. The first micro-batch of the run, which every worker rehearses, decides which shapes are compiled; a batch of any other shape, such
as a ragged tail, runs eager. Shapes are static, and under strict determinism no kernel is chosen by timing it. Only the function that
computes the loss is compiled, or the forward of each unit in it: the model, its names and its checkpoints are those of an eager run. What is compiled
computes what eager computes, up to rounding: the gradient of the first micro-batch is compared, and a distance that rounding does not explain is refused.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.data.loader import map_tensors
from lockstep.data.user_cache import cache_path
from lockstep.errors import JobError, first_line
from lockstep.training.deferred_dynamo import compiled, functions_compiled
from lockstep.training.step import problems
from lockstep.training.step.compiled_units import computing_units, only_of_job

NAME = "compile.json"
"""The document that says what was compiled, and how far its results are from eager."""

_CPUINFO = Path("/proc/cpuinfo")

LossFunction = Callable[[nn.Module, Any], Any]
"""What gives the loss of a micro-batch, or its rows for a loss over the whole batch."""

_INDUCTOR: dict[str, Any] = {
    "fallback_random": True,  # draws the random numbers of an eager run
    "compile_threads": 1,  # no pool of processes beside the worker
}
_STRICT: dict[str, Any] = {
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "benchmark_combo_kernel": False,
}
_DYNAMO: dict[str, Any] = {
    "automatic_dynamic_shapes": False,
    "automatic_dynamic_local_pgo": False,  # would bring in shapes that another run has seen
    "optimize_ddp": False,  # would cut the program at DDP's buckets, which one worker does not have
    "recompile_limit": 64,
    "fail_on_recompile_limit_hit": True,  # a fall back to eager would make the bits depend on earlier micro-batches
    "suppress_errors": False,
}
_DYNAMO_ONLY_TELLS = {
    "base_dir", "cprofile", "debug_dir_root", "debug_disable_compile_counter", "dynamo_profiler", "fake_tensor_cache_crosscheck_enabled",
    "fake_tensor_cache_enabled", "issue_3_13_0_warning", "log_compilation_metrics", "log_file_name", "log_graph_in_out_metadata",
    "pt2_compile_id_prefix", "record_compile_time_instruction_count", "record_runtime_overhead", "replay_record_enabled", "report_guard_failures",
    "repro_after", "repro_forward_only", "repro_ignore_non_fp", "repro_level", "repro_tolerance", "run_gc_after_compile", "verbose",
}  # fmt: skip
"""Settings of dynamo that say where something is, what is logged, or how it checks itself: no bit depends on them."""

_FARTHEST: dict[str, float] = {"fp32": 0.01, "bf16": 0.05, "fp16": 0.05}
"""By the precision: the largest norm of the difference between a compiled gradient and the eager one, relative to that of the eager one.

Rounding gives some 1e-7 in float32, and 0.006 in bfloat16 through 16 layers. One of n tokens that rounding routes elsewhere moves a gradient by about
1/sqrt(n). Masks of dropout that are drawn anew where they are recomputed gave 0.07 to 0.13.
"""


class Difference(NamedTuple):
    """How a compiled micro-batch differs from the same one run eager: both losses, and the parameter whose gradient differs most."""

    loss: float
    eager_loss: float
    parameter: str
    gradient: float
    """The largest absolute difference between the elements of that parameter's two gradients."""
    largest_gradient: float
    """The largest absolute element of that parameter's eager gradient."""
    distance: float
    """The norm of the difference of all gradients, relative to the norm of the eager ones."""


class CompiledLosses:
    """The compiled losses of a run, one for each of its phases. Importing the compiler takes a second or two."""

    def __init__(
        self,
        determinism: Literal["strict", "fast"],
        device: torch.device,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        units: int = 0,
    ) -> None:
        """`units` is the number of the model's modules that are compiled by themselves (`compile_units`); 0 where the loss is compiled as a whole."""
        self.device, self.precision, self.units = device, precision, units
        self.options = _INDUCTOR | (_STRICT if determinism == "strict" else {})
        self.differences: dict[str, Difference] = {}
        """By phase name."""
        self._losses: dict[str, CompiledLoss] = {}
        self._eager = False
        cpp_compiler()
        use_own_cache(device)
        forget_programs()

    def of(self, phase: str, loss: LossFunction) -> CompiledLoss:
        """The compiled loss of a phase, made at the first call."""
        if phase not in self._losses:
            kind = LossOfCompiledUnits if self.units else CompiledLoss
            self._losses[phase] = kind(loss, self)
        return self._losses[phase]

    @property
    def eager(self) -> bool:
        """Whether everything runs eager for now."""
        return self._eager

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run everything eager inside the block."""
        previous, self._eager = self._eager, True
        try:
            yield
        finally:
            self._eager = previous

    def compare(
        self,
        phase: str,
        losses: tuple[float, float],
        gradients: Mapping[str, Tensor],
        eager: Mapping[str, Tensor],
        gather: Callable[[dict[str, _Deviation]], list[dict[str, _Deviation]]] = lambda part: [part],
    ) -> None:
        """Note how far a phase's compiled micro-batch is from the eager one; `losses` are (compiled, eager).

        Where each rank has its part of the gradients, `gather` collects what it is given from all of them. JobError where the gradient is farther than
        rounding explains.
        """
        by_rank = gather({name: _deviation(gradients[name], eager[name]) for name in gradients})
        deviations = {name: _Deviation.joined([of_rank[name] for of_rank in by_rank]) for name in gradients}
        worst = max(deviations, key=lambda name: deviations[name].largest)
        difference = Difference(
            *losses,
            worst,
            deviations[worst].largest,
            deviations[worst].largest_eager,
            _distance(deviations.values()),
        )
        self.differences[phase] = difference
        short = any(gradient.dtype in (torch.bfloat16, torch.float16) for gradient in eager.values())
        if difference.distance > _FARTHEST["bf16" if short else self.precision]:
            raise _too_far(difference)

    def text(self) -> str:
        """The text of compile.json: the compiler, the number of programs, the graph breaks, and the differences from eager."""
        from torch._dynamo.utils import counters

        breaks = [" ".join(str(reason).split()) for reason in counters["graph_break"]]
        report = {
            **identity_of_compiler(self),
            **({"units": self.units} if self.units else {}),
            "programs": counters["stats"]["unique_graphs"],
            "graph_breaks": breaks,
            "first_micro_batch": {
                name: difference._asdict() for name, difference in self.differences.items()
            },
        }
        return json.dumps(report, indent=1) + "\n"


class CompiledLoss:
    """A phase's loss: compiled for batches that have the shapes of the first one, eager for all others."""

    def __init__(
        self, loss: LossFunction, all_losses: CompiledLosses, program: Program | None = None
    ) -> None:
        """`program` computes what is compiled of it; None: all of it is."""
        self._loss, self._all = loss, all_losses
        self._program = program or Program(loss, all_losses.options)
        self._shapes: tuple[str, ...] | None = None

    def compiles(self, batch: Any) -> bool:
        """Whether a batch has the compiled shapes. The first batch asked about decides them."""
        shapes = shapes_of(batch)
        if self._shapes is None:
            self._shapes = shapes
        return shapes == self._shapes

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """The loss of `batch`, or its rows. JobError where it cannot be compiled."""
        if self._all.eager or not self.compiles(batch):
            return self._loss(model, batch)
        return self._program(model, batch)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The block in which the gradients of what the last call gave are computed."""
        yield


class LossOfCompiledUnits(CompiledLoss):
    """A phase's loss whose units are compiled: those of batches that have the shapes of the first one. What is outside of units runs eager."""

    def __init__(self, loss: LossFunction, all_losses: CompiledLosses) -> None:
        super().__init__(loss, all_losses, Program(_computed, all_losses.options, all_losses.units))
        self._is_compiled = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """The loss of `batch`, or its rows. JobError where a unit cannot be compiled."""
        self._is_compiled = not self._all.eager and self.compiles(batch)
        with self.backward():
            return self._loss(model, batch)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A unit that is recomputed in a backward is computed as in its forward."""
        with computing_units(self._program if self._is_compiled else None):
            yield


def _computed(forward: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return forward(*arguments, **keywords)


class Program:
    """A function that is compiled wherever it is called with something new."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], callers: int = 1) -> None:
        """`callers` share the function, each with `recompile_limit` programs."""
        self._compiled = compiled(function, dynamic=False, options=options)
        self._limit = _DYNAMO["recompile_limit"] * callers
        self._settings = _DYNAMO | {"recompile_limit": self._limit}
        if callers > 1:
            self._settings["accumulated_recompile_limit"] = self._limit

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns. JobError where it cannot be compiled."""
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            # An active dispatch mode would make the operators run one by one, with other bits.
            with (
                config.patch(self._settings),
                _disable_current_modes(),
                only_of_job(),
                functions_compiled(),
            ):
                return self._compiled(*arguments)
        except FailOnRecompileLimitHit as error:
            raise problems.COMPILED_AGAIN(limit=self._limit, got=first_line(error)[:300]) from error
        except TorchDynamoException as error:
            raise problems.NOT_COMPILED(got=first_line(error)[:300]) from error


def shapes_of(batch: Any) -> tuple[str, ...]:
    """What a program is compiled for: each tensor's dtype, shape, strides, device and requires_grad; a plain value itself; else the class."""
    shapes: list[str] = []

    def tensor(one: Tensor) -> Tensor:
        strides = one.stride() if one.layout is torch.strided else one.layout
        shapes.append(f"{one.dtype} {tuple(one.shape)} {strides} {one.device} {one.requires_grad}")
        return one

    def other(one: Any) -> Any:
        plain = isinstance(one, bool | int | float | str | bytes | None)
        shapes.append(f"{type(one).__qualname__} {one!r}" if plain else type(one).__qualname__)
        return one

    map_tensors(batch, tensor, other)
    return tuple(shapes)


def check_enabled() -> None:
    """SpecError where the environment has `torch.compile` return functions as they are: what should be compiled would be computed eager, with other bits."""
    from torch._dynamo import config

    variables = [
        name for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE") if os.environ.get(name) == "1"
    ]
    if config.disable or variables:
        raise problems.COMPILE_DISABLED(
            got=f"{variables[0]}=1" if variables else "torch._dynamo.config.disable"
        )


def identity_of_compiler(losses: CompiledLosses) -> dict[str, str]:
    """For the identity: the settings of dynamo, inductor and autograd's compiler as digests, the C++ compiler with its version, and the vector instructions it may use.

    On CUDA also the compiler of kernels.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as autograd
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with config.patch(losses.options):
        digest = _digest(config.save_config_portable())
    with dynamo.patch(_DYNAMO):
        settings = {
            name: value
            for name, value in dynamo.save_config_portable().items()
            if name not in _DYNAMO_ONLY_TELLS and isinstance(value, bool | int | float | str | None)
        }
    vectors = pick_vec_isa()
    return {
        "compile.dynamo": _digest(settings),
        "compile.inductor": digest,
        "compile.autograd": _digest(autograd.save_config_portable()),
        "compile.compiler": cpp_compiler(),
        "compile.vectors": str(vectors) if vectors else "none",
        **_kernel_compiler(losses.device),
    }


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:16]


def _kernel_compiler(device: torch.device) -> dict[str, str]:
    """On CUDA: the versions of Triton, which writes the kernels, and of CUDA, and the ptxas that assembles them if it is not Triton's own."""
    if device.type != "cuda":
        return {}
    try:
        triton = str(importlib.import_module("triton").__version__)
    except ImportError:  # inductor then tells it
        triton = "none"
    return {
        "compile.triton": triton,
        "compile.cuda": str(torch.version.cuda),
        "compile.ptxas": os.environ.get("TRITON_PTXAS_PATH", "Triton's own"),
    }


@cache
def cpp_compiler() -> str:
    """The C++ compiler that inductor uses, with its version. SpecError where there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        name = get_cpp_compiler()
        completed = subprocess.run(
            [name, "--version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (InvalidCxxCompiler, OSError, subprocess.SubprocessError) as error:
        raise problems.NO_COMPILER(got=os.environ.get("CXX", "g++")) from error
    return completed.stdout.partition("\n")[0].strip()


def forget_programs() -> None:
    """Forget the programs that this process compiled for another run: they would count towards the recompile limit and in compile.json."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()


def use_own_cache(device: torch.device) -> None:
    """Have inductor keep its programs in a folder for this user, processor, GPU, compilers and torch version.

    Inductor compiles for the local processor, but its file names do not say which: another machine with the same home would load
    instructions that it does not have. A folder that the user sets in TORCHINDUCTOR_CACHE_DIR is used as it is.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    kind = f"{_processor()} {cpp_compiler()} {torch.__version__}"
    if device.type == "cuda":
        kind += f" {torch.cuda.get_device_name(device)} {_kernel_compiler(device)}"
    folder = cache_path("compiled", kind)
    with suppress(OSError):  # the home is not writable: torch uses a temporary folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _processor() -> str:
    """Model and instruction set of the processor, from /proc/cpuinfo; empty where there is none."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


class _Deviation(NamedTuple):
    """How far a gradient, or a rank's part of it, is from the eager one: largest absolute elements and norms of their difference and of the eager one."""

    largest: float
    largest_eager: float
    norm: float
    norm_eager: float

    @classmethod
    def joined(cls, parts: Sequence[_Deviation]) -> _Deviation:
        """That of the whole, of its parts."""
        largest, largest_eager, norms, norms_eager = zip(*parts, strict=True)
        return cls(max(largest), max(largest_eager), math.hypot(*norms), math.hypot(*norms_eager))


def _deviation(gradient: Tensor, eager: Tensor) -> _Deviation:
    reference = eager.detach().double()
    difference = gradient.detach().double() - reference
    return _Deviation(
        _largest(difference), _largest(eager.detach()), float(difference.norm()), float(reference.norm())
    )


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _distance(gradients: Iterable[_Deviation]) -> float:
    """The norm of the differences, all together, relative to that of the eager gradients."""
    _, _, norm, reference = _Deviation.joined(list(gradients))
    return norm / reference if reference else math.inf if norm else 0.0


def _too_far(difference: Difference) -> JobError:
    from torch._functorch import config as autograd

    budget: float = autograd.activation_memory_budget
    remedy = (
        f"torch._functorch.config.activation_memory_budget is {budget:g} here, with which torch recomputes dropout with other draws in backward: leave it at 1"
        if budget != 1
        else "look for what the loss does otherwise when it is compiled"
    )
    return problems.COMPILED_DIFFERS(
        distance=f"{difference.distance:.2g}",
        name=difference.parameter,
        got=f"{difference.gradient:.3g}",
        largest=f"{difference.largest_gradient:.3g}",
        remedy=remedy,
    )
