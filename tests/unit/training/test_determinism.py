"""What `determinism` sets and restores, and the probe that tells one machine's bits from another's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor, nn

from lockstep.proof.identity_changes import causes
from lockstep.threads import LIBRARIES, library_threads
from lockstep.training import problems
from lockstep.training.determinism import (
    _numpy_results,
    _probe_results,
    _reduced_precision,
    _values,
    check_kept,
    determinism,
    filled_memory,
    numerics_probe,
    numpy_probe,
)
from lockstep.training.start import check_identity
from lockstep.training.torch_settings import Settings
from lockstep.training.worker_environment import WORKER_ENVIRONMENT
from tests.forked import script
from tests.raised import raises

CPU = torch.device("cpu")


def settings() -> tuple[Any, ...]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
        torch.backends.mha.get_fastpath_enabled(),
    )


@pytest.mark.parametrize(("kind", "strict"), [("strict", True), ("fast", False)])
def test_determinism_sets_the_process_and_puts_it_back(kind: Literal["strict", "fast"], strict: bool) -> None:
    before = settings()
    with determinism(kind, threads=3):
        assert settings() == (3, strict, False, False, not strict, not strict)
    assert settings() == before


def test_determinism_puts_back_after_an_error_and_what_was_set_by_others() -> None:
    before = settings()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(2)
    try:
        changed = settings()
        with pytest.raises(ZeroDivisionError), determinism("strict", threads=1):
            raise ZeroDivisionError
        assert settings() == changed
    finally:
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])
        torch.set_num_threads(before[0])


def test_a_setting_that_only_warns_is_none() -> None:
    """It lets an operator compute other bits each time."""
    with determinism("strict", threads=1):
        kept = Settings(torch.device("cpu"))
        torch.use_deterministic_algorithms(True, warn_only=True)
        with raises(problems.JOB_SETTING, name="torch.use_deterministic_algorithms", got=False):
            check_kept("strict", 1)
        kept.put_back()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        check_kept("strict", 1)
        torch.backends.mha.set_fastpath_enabled(True)
        with raises(problems.JOB_SETTING, name="torch.backends.mha.set_fastpath_enabled", got=True):
            check_kept("strict", 1)
        torch.backends.mha.set_fastpath_enabled(False)
        with (
            torch.compiler.set_stance("default"),
            raises(problems.JOB_SETTING, name="torch.compiler.set_stance", got="default"),
        ):
            check_kept("strict", 1)


def gradients_of_four_calls() -> set[bytes]:
    """Of a function that no process has called yet."""

    def activation(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = torch.nn.functional.layer_norm(x, [16], weight, bias)
        x = torch.nn.functional.gelu(x * torch.sigmoid(1.702 * x))
        return torch.softmax(x, -1) + x / (x.std(-1, keepdim=True) + 1e-3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(activation)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, norm, last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)
        x = torch.randn(8, 8)
    gradients = set()
    for _ in range(4):
        y = last(scripted(first(x), norm.weight, norm.bias))
        parameters = [*first.parameters(), *norm.parameters()]
        found = torch.autograd.grad(y.sum(), parameters)
        gradients.add(b"".join(gradient.numpy().tobytes() for gradient in found))
    return gradients


def test_a_function_of_torch_script_gives_the_same_bits_from_its_first_call_on() -> None:
    """Else the calls that a process has made would decide, and a resumed run begins anew. The control: without, they do."""
    with determinism("strict", threads=1):
        assert len(gradients_of_four_calls()) == 1
    with determinism("fast", threads=1):
        assert len(gradients_of_four_calls()) > 1


@pytest.mark.parametrize("kind", ["strict", "fast"])
def test_what_a_job_sets_for_its_process_is_put_back(kind: Literal["strict", "fast"]) -> None:
    """On a warm worker another trial follows, whose data are made before its model sets anything."""
    products = torch.backends.mkldnn.matmul
    before = products.fp32_precision
    with determinism(kind, 1):
        torch.set_default_dtype(torch.float64)
        products.fp32_precision = "bf16"
    assert torch.get_default_dtype() is torch.float32
    assert products.fp32_precision == before


def test_environment_is_set_where_it_is_not() -> None:
    with determinism("strict", threads=1):
        assert all(os.environ[name] for name in WORKER_ENVIRONMENT)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which NumPy's products have two threads unless somebody says otherwise."""
    for name in LIBRARIES:
        monkeypatch.setenv(name, "2")
    with ThreadpoolController().limit(limits=2):
        if library_threads() < 2:
            pytest.skip("NumPy's BLAS has one thread only")
        yield


def product() -> bytes:
    draw = np.random.default_rng(0)
    matrix = draw.standard_normal((2000, 300), dtype=np.float32)
    return bytes((matrix.T @ draw.standard_normal(2000, dtype=np.float32)).data)


def test_products_of_numpy_depend_on_no_number_of_cores(two_cores: None) -> None:
    """The negative control is the product with the machine's own number of threads."""
    before = {name: os.environ[name] for name in LIBRARIES}
    with ThreadpoolController().limit(limits=1):
        wanted = product()
    if (own := product()) == wanted:
        pytest.skip("this BLAS adds up alike in two threads")
    with determinism("strict", threads=2):
        assert product() == wanted
        assert torch.get_num_threads() == 2
        assert {os.environ[name] for name in LIBRARIES} == {"1"}, "for libraries that are loaded later"
    assert product() == own
    assert {name: os.environ[name] for name in LIBRARIES} == before


def test_a_job_that_gives_numpy_more_threads_is_refused(two_cores: None) -> None:
    with determinism("strict", threads=1):
        check_kept("strict", 1)
        with ThreadpoolController().limit(limits=2, user_api="blas"):
            with raises(problems.JOB_SETTING, name=re.compile("threads of NumPy's BLAS"), got=2, wanted=1):
                check_kept("strict", 1)
            check_kept("fast", 1)


def test_filled_memory_is_put_back() -> None:
    with determinism("strict", threads=1):
        with filled_memory(True):
            assert torch.empty(3).isnan().all()
        assert settings()[3] is False


def test_probe_is_stable() -> None:
    """In a process, whatever it drew and allocated in between."""
    with determinism("strict", threads=1):
        first = numerics_probe(CPU)
        _kept = [torch.randn(1 + 7 * i) for i in range(20)]
        torch.manual_seed(9)
        assert [numerics_probe(CPU) for _ in range(3)] == [first] * 3
        of_numpy = numpy_probe()
        _more = [np.empty(1 + 7 * i) for i in range(20)]
        assert [numpy_probe() for _ in range(3)] == [of_numpy] * 3 != [first] * 3
    assert len(first) == 16
    assert int(first, 16) >= 0


PROBE = """
import torch
from lockstep.training.determinism import determinism, numerics_probe, numpy_probe
with determinism("strict", 1):
    print(numerics_probe(torch.device("cpu")), numpy_probe())
"""


def test_probe_is_that_of_the_machine_and_not_of_the_process() -> None:
    with determinism("strict", threads=1):
        here = f"{numerics_probe(CPU)} {numpy_probe()}"
    process = script(PROBE)
    assert process.communicate(timeout=120)[0].strip() == here


@pytest.mark.scenario
def test_probe_tells_other_instruction_sets() -> None:
    """As on an older processor: torch's own kernels without vector instructions."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no vector instructions to leave out")
    with determinism("strict", threads=1):
        here = numerics_probe(CPU)
    of_torch = probes(ATEN_CPU_CAPABILITY="default")[0]
    assert len(of_torch) == len(here)
    assert of_torch != here


@pytest.mark.scenario
def test_probe_of_numpy_tells_other_kernels_of_its_blas() -> None:
    """Which torch's cannot: an older processor's, where torch has the same instructions."""
    if not any("openblas" in one["internal_api"] for one in ThreadpoolController().info()):
        pytest.skip("NumPy's BLAS is not OpenBLAS")
    (own, _), (other, of_numpy) = probes(), probes(OPENBLAS_CORETYPE="Nehalem")
    assert other == own
    with determinism("strict", threads=1):
        assert of_numpy != numpy_probe()


LIBM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
double pow(double x, double y) {
    double (*of_system)(double, double) = (double (*)(double, double))dlsym(RTLD_NEXT, "pow");
    return nextafter(of_system(x, y), INFINITY);
}
"""


@pytest.mark.scenario
def test_probe_of_numpy_tells_another_c_library(tmp_path: Path) -> None:
    """By which Python takes powers, as Adam does of its betas: with the wheels of torch and NumPy all else is equal."""
    source, library = tmp_path / "libm.c", tmp_path / "libm.so"
    source.write_text(LIBM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lm"], check=True, timeout=120)
    (_, own), (_, other) = probes(), probes(LD_PRELOAD=str(library))
    assert other != own


def probes(**variables: str) -> list[str]:
    """Both probes in a process with these variables."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout.split()


def test_a_field_that_one_side_lacks_is_a_difference() -> None:
    """Also where its value is None: it was looked at on one side alone."""
    fields = {"device": "cpu", "clip_norm": None}
    check_identity(start_from(fields), dict(fields))
    assert causes(fields, dict(fields)) == []
    for saved in ({"device": "cpu"}, {**fields, "more": 1}):
        with raises(problems.OTHER_IDENTITY):
            check_identity(start_from(saved), fields)
        assert causes(saved, fields)


def start_from(fields: dict[str, Any]) -> Any:
    return SimpleNamespace(fork=False, facts=SimpleNamespace(identity_fields=fields))


def test_what_the_probe_adds_on_cuda_is_finite_and_repeats() -> None:
    """On the CPU here: a GPU computes it in other kernels."""
    with determinism("strict", threads=1):
        first, again = (list(_reduced_precision(CPU)) for _ in range(2))
    assert len({name for name, _ in first}) == len(first) == 6
    for (_, one), (_, other) in zip(first, again, strict=True):
        assert one.isfinite().all()
        assert one.count_nonzero()
        assert torch.equal(one, other)


def test_the_probes_compute_what_they_did_when_runs_were_recorded() -> None:
    """Another number in them would make every recorded run one of another machine. The last bits are the machine's: means of absolute values show what is computed."""
    assert _values(CPU, 3).tolist() == [-0.623174250125885, 0.8728041648864746, 0.36878252029418945]
    with determinism("strict", threads=1):
        of_torch = [*_probe_results(CPU), *_reduced_precision(CPU)]
    results = [(name, result.detach().double().numpy()) for name, result in of_torch]
    recorded = json.loads(Path(__file__).with_name("probe_results.json").read_text())
    for (name, result), (wanted, shape, mean) in zip([*results, *_numpy_results()], recorded, strict=True):
        assert (name, list(np.shape(result))) == (wanted, shape)
        # no `==`: that each computation is still this one; its last bits are a machine's, and the recorded mean is of one
        assert float(np.abs(result).mean(dtype=np.float64)) == pytest.approx(mean, rel=1e-3), name
