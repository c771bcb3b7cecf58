"""G1 with `compile: true`: what inductor writes computes one value of every bit, on any number of workers and over a resume."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.record.events.union import Document as Text
from lockstep.record.events.union import Event
from lockstep.record.ledger.tables import read_parquet, write_parquet
from lockstep.training.step import compiled, problems
from lockstep.training.step.compiled import CompiledLoss, CompiledLosses, identity_of_compiler
from tests.distributed import kinds as document_kinds
from tests.distributed import training
from tests.distributed.kinds import document as document_of_kind
from tests.distributed.phase_kinds import HELD as PHASES
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.test_resume import RUN, taken_up
from tests.distributed.test_same_bits import document
from tests.distributed.training import Document, Kept, Trained, train, train_and_die, train_attempt
from tests.forked import Forked
from tests.in_process import here
from tests.raised import raises

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
"""The compiler's own: its imports use the one, and it looks at the values between two programs."""


class Masked(Plain):
    """A loss whose weight is read from a tensor, so that Python goes on between two programs."""

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        outputs = model(x)
        weight = float((y > 0).sum())
        losses: Tensor = F.cross_entropy(outputs, y, reduction="none")
        return lockstep.Loss((losses * (y > 0)).sum(), weight)


def half(graph: torch.fx.GraphModule, _: Any) -> Any:
    """A compiler whose programs give half of what they should."""
    return lambda *inputs: tuple(each / 2 for each in graph.forward(*inputs))


def total(losses: Tensor) -> Tensor:
    return losses.sum()


class OwnProgram(Plain):
    """Its loss calls a function that the job has compiled."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._total = torch.compile(total, backend=half)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(self._total(F.cross_entropy(model(x), y, reduction="none")), len(y))


@pytest.mark.parametrize(
    ("determinism", "as_written"), [("strict", True), pytest.param("fast", False, id="control")]
)
def test_a_function_that_the_job_compiles_runs_as_it_is_written_under_strict(
    pool: Pool, determinism: str, as_written: bool
) -> None:
    """Its programs follow from what a process has computed before. It is told, and whoever wants programs has `compile`, of which nothing is told.

    In another process: the compiler keeps functions, which another job's run here would tell of.
    """
    more = {"compile": False, "determinism": determinism}
    (plain,), (own,) = (
        pool.run(1, train, small(job, **more)) for job in ("small_jobs:Plain", "test_compile:OwnProgram")
    )
    assert (own.weights_digest == plain.weights_digest) == as_written
    told = f"the job compiles {__name__}.total with torch.compile: "
    assert [text.startswith(told) for text in own.warnings] == [True] * as_written
    compiles = {"compile": True, "determinism": determinism}
    for run in (plain, *pool.run(2, train, small(**compiles))):
        assert not [text for text in run.warnings if "torch.compile" in text]


def small(job: str = "small_jobs:Plain", **more: Any) -> Document:
    """Two epochs of 32 samples, whose last steps are ragged."""
    return {
        "job": {"use": f"tests.distributed.{job}", "params": {"samples": 32, "norm": "batch"}},
        "batch": {"global": 12, "micro": 3},
        "length": {"epochs": 2},
        "data": {"drop_last": False},
        "compile": True,
        **more,
    }


def told(run: Document) -> tuple[Trained, dict[str, Any]]:
    """A run, and its compile.json."""
    texts: list[str] = []

    class Telling(Kept):
        def tell(self, event: Event) -> None:
            if isinstance(event, Text) and event.name == compiled.NAME:
                texts.append(event.text)
            super().tell(event)

    with mock.patch.object(training, "Kept", Telling):
        trained = train(run)
    (text,) = texts
    return trained, json.loads(text)


@pytest.mark.scenario
def test_a_compiled_run_says_what_was_compiled_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    """Its model has the names of an eager one, its ragged tail runs eager, and it is another run than an eager one."""
    whole, found = told(small())
    assert found["programs"] >= 1
    difference = found["first_micro_batch"][""]
    assert difference["gradient"] <= 1e-4 * difference["largest_gradient"]
    assert sorted(whole.gradients) == sorted(training.train(small(compile=False)).gradients)

    run = small(checkpoint={"storage": str(tmp_path), "every": None})
    train_attempt(run, RUN, AttemptOrigin(), stop_after=2)
    ended = train_attempt(run, RUN, taken_up(str(tmp_path), None))
    assert (ended.rows, ended.weights_digest, ended.identity) == (
        whole.rows,
        whole.weights_digest,
        whole.identity,
    )


@pytest.mark.scenario
def test_a_compiled_run_has_one_value_on_two_workers(pool: Pool) -> None:
    assert pool.run(2, train, small()) == [train(small())] * 2


CASES = {
    "digits": lambda: document("digits", 6, compile=True),
    "gpt in bf16": lambda: document("gpt", 6, "bf16", compile=True),
    "fp16": lambda: small(precision="fp16"),
    "graph breaks": lambda: small("test_compile:Masked"),
    "phases": lambda: document_of_kind(PHASES[0], compile=True),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of programs of this module's own: each is compiled once, which takes the most time here, and read from then on."""
    return str(tmp_path_factory.mktemp("programs"))


@pytest.mark.exact
@pytest.mark.parametrize("case", CASES)
def test_compiled_runs_have_one_value(pool: Pool, case: str, programs: str) -> None:
    """On 1, 2 and 3 workers, with loader processes; they read what this process has compiled."""
    run = CASES[case]()
    whole = train_in_folder(run, programs)
    assert whole.identity != train({**run, "compile": False}).identity
    for workers in (1, 2, 3):
        data = {**run.get("data", {}), "loader_processes": workers % 3}
        ranks = pool.run(workers, train_in_folder, {**run, "data": data}, programs)
        assert ranks == [whole] * workers


@pytest.mark.exact
def test_workers_that_compile_at_once_have_the_value_of_one(pool: Pool, tmp_path: Path) -> None:
    """Two that find no programs write them into one folder, at the same time, and the run is that of a process with its own."""
    whole = train_in_folder(small(), str(tmp_path / "alone"))
    assert pool.run(2, train_in_folder, small(), str(tmp_path / "together")) == [whole] * 2
    assert list((tmp_path / "together").rglob("*.so"))


def train_in_folder(run: Document, folder: str) -> Trained:
    """With inductor's programs in this folder."""
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        return train(run)


def go_on_in_folder(run: Document, origin: AttemptOrigin, folder: str) -> Trained:
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        return train_attempt(run, RUN, origin)


@pytest.mark.exact
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_compiled_run_outlives_a_kill(
    pool: Pool, workers: int, tmp_path: Path, programs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", programs)
    run = document("digits", 6, compile=True, checkpoint={"storage": str(tmp_path), "every": {"steps": 1}})
    whole = train(document("digits", 6, compile=True))
    killed = Forked(train_and_die, run, RUN, 4)
    assert killed.wait(300) == -signal.SIGKILL, killed.communicate()
    for rank, ended in enumerate(
        pool.run(workers, go_on_in_folder, run, taken_up(str(tmp_path), None), programs)
    ):
        assert 0 < len(ended.digests) < len(whole.digests)
        assert ended.digests == whole.digests[-len(ended.digests) :]
        assert (ended.weights_digest, ended.identity) == (whole.weights_digest, whole.identity)
        assert rank or ended.rows == whole.rows


@pytest.mark.exact
def test_a_compiled_run_is_verified_by_the_command(
    programs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """G6: all its steps, and those after a checkpoint, in a process that compiles anew what it has not read; a planted loss is found."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", programs)
    saving = {"storage": str(tmp_path / "runs"), "every": {"steps": 2}, "keep_last": 9}
    told = small(checkpoint=saving, record={"uri": "off", "digest_every": 1})
    run = Path(lockstep.train(told, local=True).folder)
    words = ("verify", run.name, "--uri", "off", "--storage", str(run.parent), "--local")
    for part in (("--all",), ("--from", "4")):
        code, shown, more = here(monkeypatch, capfd, tmp_path, *words, *part)
        assert code == 0, (shown, more)
    rows = read_parquet(run / "ledger.parquet")
    rows[4] = rows[4]._replace(loss=math.nextafter(rows[4].loss, 0.0))
    write_parquet(rows, run / "ledger.parquet")
    code, shown, more = here(monkeypatch, capfd, tmp_path, *words, "--from", "4")
    assert code == 1 and "step 5" in shown + more, (shown, more)


def train_late(run: Document) -> Trained:
    """The broken variant: a worker compiles from its fourth call on, as one that goes by what it has seen would."""
    calls = 0

    def late(self: CompiledLoss, batch: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls > 6 and len(batch[0]) == 3

    with mock.patch.object(CompiledLoss, "compiles", late):
        return train({**run, "rehearsal": "off"})


@pytest.mark.exact
def test_programs_that_follow_from_what_was_computed_before_break_the_promise(pool: Pool) -> None:
    """The negative control: under one identity two workers get other bits."""
    run = small()
    one, two = train_late(run), pool.run(2, train_late, run)[0]
    assert one.identity == two.identity
    assert one.rows != two.rows


@pytest.mark.exact
def test_a_loss_that_would_be_compiled_again_and_again_is_refused() -> None:
    """torch would go on eager from then on, with other bits."""
    calls = [0]

    def counting(model: nn.Module, batch: Any) -> lockstep.Loss:
        calls[0] += 1
        return lockstep.Loss((model(batch) * calls[0]).sum(), 1.0)

    loss = CompiledLosses("strict", torch.device("cpu")).of("", counting)
    with (
        mock.patch.dict(compiled._DYNAMO, {"recompile_limit": 2}),
        raises(problems.COMPILED_AGAIN, limit=2) as info,
    ):
        for _ in range(4):
            loss(nn.Linear(2, 2), torch.ones(3, 2))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_an_environment_in_which_nothing_is_compiled_is_refused(name: str) -> None:
    """It would compute eager, with other bits and, where the first micro-batch has the same ones, under the identity of compiled runs."""
    run = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "jobs/digits/train.yaml",
        "--local",
        "compile=true",
        "record.uri=off",
    ]
    done = subprocess.run(
        run,
        env={**os.environ, name: "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert str(problems.COMPILE_DISABLED(got=f"{name}=1")) in done.stderr


def test_settings_of_the_compiler_are_in_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import config

    losses = CompiledLosses("strict", torch.device("cpu"))
    plain = identity_of_compiler(losses)
    monkeypatch.chdir("/")
    with config.patch(verbose=True, debug_dir_root="/elsewhere"):
        assert identity_of_compiler(losses) == plain
    with config.patch(numpy_default_float="float32"):
        assert identity_of_compiler(losses) | {"compile.dynamo": plain["compile.dynamo"]} == plain
        assert identity_of_compiler(losses) != plain


class Recomputing(document_kinds.Dropouts):
    """Deep enough for the partitioner to choose what it recomputes: its dropout, with other draws (pytorch#190758)."""

    def model(self) -> nn.Module:
        layers = [
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.5), nn.Linear(256, 32))
            for _ in range(3)
        ]
        return nn.Sequential(
            nn.Linear(document_kinds.FEATURES, 32), *layers, nn.Linear(32, document_kinds.CLASSES)
        )


@pytest.mark.scenario
def test_a_gradient_that_is_not_that_of_an_eager_run_is_refused() -> None:
    """A distance that rounding does not explain, measured on the first micro-batch; and the setting is in the identity."""
    from torch._functorch import config

    run = document_of_kind(Recomputing, compile=True, rehearsal="off")
    sound = train(run)
    wanted = re.compile("activation_memory_budget is 0.5 here")
    with config.patch(activation_memory_budget=0.5), raises(problems.COMPILED_DIFFERS, remedy=wanted):
        train(run)
    with (
        config.patch(activation_memory_budget=0.5),
        mock.patch.dict(compiled._FARTHEST, {"fp32": math.inf}),
    ):
        other = train(run)
    assert other.identity != sound.identity and other.digests != sound.digests
