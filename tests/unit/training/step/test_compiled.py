"""What is compiled, and where nothing can be."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.training.integrity.problems import COMPILED
from lockstep.training.integrity.rehearsal.micro_batch import check_model
from lockstep.training.step import compiled, problems
from lockstep.training.step.compiled import (
    CompiledLosses,
    cpp_compiler,
    identity_of_compiler,
    shapes_of,
    use_own_cache,
)
from tests.raised import raises

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
"""The compiler's own imports use it."""


CPU = torch.device("cpu")


def test_a_program_is_for_batches_of_one_shape() -> None:
    """Values of tensors are of no account; types, shapes and strides are, and the values of plain numbers."""
    x, y = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
    of = shapes_of((x, {"y": y, "scale": 2}))
    assert shapes_of((x + 1, {"y": y + 1, "scale": 2})) == of
    for other in (
        (x[:3], {"y": y, "scale": 2}),
        (x.double(), {"y": y, "scale": 2}),
        (x.t().contiguous().t(), {"y": y, "scale": 2}),
        (x, {"y": y, "scale": 3}),
        (x, {"y": y}),
    ):
        assert shapes_of(other) != of


@pytest.fixture
def config() -> Iterator[Any]:
    from torch._inductor import config

    # Torch leaves it on once somebody has asked for deterministic algorithms.
    with config.patch(deterministic=False):
        yield config


def test_a_machine_without_a_compiler_is_told(config: Any) -> None:
    cpp_compiler.cache_clear()
    with (
        config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        raises(problems.NO_COMPILER) as info,
    ):
        CompiledLosses("strict", CPU)
    assert "\n" not in str(info.value)


def test_another_width_of_vectors_is_another_identity(config: Any) -> None:
    """A program adds up in as many lanes as the processor has: so has one that is told to use fewer."""
    losses = CompiledLosses("strict", CPU)
    here = identity_of_compiler(losses)
    with config.patch({"cpp.simdlen": 1}):
        assert identity_of_compiler(losses) != here
    assert identity_of_compiler(CompiledLosses("fast", CPU)) != here


def test_programs_are_kept_for_one_processor_and_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(processor: str) -> Path:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr(compiled, "_processor", lambda: processor)
        use_own_cache(CPU)
        return Path(compiled.os.environ["TORCHINDUCTOR_CACHE_DIR"])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = folder("flags: avx2"), folder("flags: avx2 avx512f")
    assert one != other
    assert one.is_relative_to(tmp_path)
    assert one.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    use_own_cache(CPU)
    assert compiled.os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"


@pytest.mark.usefixtures("config")
def test_on_a_gpu_its_kind_and_the_compilers_of_kernels_count_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU in this test: the names of the GPU and of Triton are put in by hand, once torch's compiler has looked for it."""

    def found(gpu: str, triton: str) -> tuple[Path, dict[str, str]]:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
        losses = CompiledLosses("strict", torch.device("cuda"))
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), identity_of_compiler(losses)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    identity_of_compiler(CompiledLosses("strict", CPU))  # torch looks for Triton while it is imported
    folder, identity = found("H100", "3.5.0")
    other_gpu, same = found("H200", "3.5.0")
    newer_folder, newer = found("H100", "3.6.0")
    assert len({folder, other_gpu, newer_folder}) == 3
    assert identity == same
    assert (identity["compile.triton"], newer["compile.triton"]) == ("3.5.0", "3.6.0")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/cuda/bin/ptxas")
    assert found("H100", "3.5.0")[1] != identity


@pytest.mark.scenario
def test_a_model_that_the_job_has_compiled_is_refused() -> None:
    """Its settings would be in no identity, and its weights under other names."""
    for model in (torch.compile(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))):
        if isinstance(model, nn.Sequential):
            model[0].compile()
        with raises(COMPILED, got=re.compile("^the job itself")):
            check_model(model)
