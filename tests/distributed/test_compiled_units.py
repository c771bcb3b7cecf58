"""G1 with `compile: units`: each block is a program of its own, and a run has one value of every bit under every sharding."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import JobError
from lockstep.spec.loading import load_spec
from lockstep.training.step import compiled, compiled_units, problems
from lockstep.training.step.compiled_units import check_units_apart, compile_units
from lockstep.training.step.full_sharding import FullSharding
from tests.distributed.pool import Pool
from tests.distributed.small_jobs import Plain
from tests.distributed.test_compile import go_on_in_folder, told, train_in_folder
from tests.distributed.test_full_sharding import kinds
from tests.distributed.test_resume import RUN, taken_up
from tests.distributed.test_same_bits import document
from tests.distributed.training import Document, Trained, train, train_and_die
from tests.forked import Forked
from tests.in_process import here
from tests.raised import raises

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
"""The compiler's own."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of programs of this module's own."""
    return str(tmp_path_factory.mktemp("programs"))


class Block(nn.Module):
    """Dropout, and a part that the block itself has computed again in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.dropout = nn.Linear(8, 24), nn.Linear(24, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.out(torch.tanh(self.into(x))))


class Stack(nn.Module):
    """Blocks that are computed again by the model itself, and not by the spec's setting."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        y: Tensor = self.head(x)
        return y


class Blocks(Plain):
    def model(self) -> nn.Module:
        return Stack()

    def activation_checkpoints(self, model: nn.Module) -> Sequence[nn.Module]:
        return [model.get_submodule("blocks.0")]


def small(**more: Any) -> Document:
    """Two epochs of 32 samples, whose last steps are ragged."""
    return {
        "job": {"use": "tests.distributed.test_compiled_units:Blocks", "params": {"samples": 32}},
        "batch": {"global": 12, "micro": 3},
        "length": {"epochs": 2},
        "data": {"drop_last": False},
        "compile": "units",
        **more,
    }


@pytest.mark.scenario
def test_units_have_one_value_under_every_sharding(pool: Pool, programs: str) -> None:
    """Whole and by shards, begun whole and by shards; another run than one that is compiled as a whole, or not at all."""
    with mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": programs}):
        whole, report = told(small())
    assert report["units"] == 3
    assert report["first_micro_batch"][""]["distance"] < 1e-5
    for workers, more in (
        (2, {"sharding": "full"}),
        (3, {"sharding": "full", "rehearsal": "off"}),
        (2, {"sharding": "optimizer"}),
    ):
        assert pool.run(workers, train_in_folder, small(**more), programs) == [whole] * workers
    eager = train(small(compile=False))
    assert eager.identity != whole.identity and eager.digests != whole.digests


CASES: dict[str, Callable[[], Document]] = {
    "gpt in bf16": lambda: document("gpt", 8, "bf16", compile="units"),
    "every kind of parameter": lambda: {**kinds("adamw"), "compile": "units"},
    "recomputed": lambda: {**kinds("recomputed"), "precision": "fp32", "compile": "units"},
    "recomputed in bf16": lambda: small(precision="bf16", activation_checkpointing=True),
    "named": lambda: {**kinds("sgd"), "compile": {"units": ["blocks.*.into", "head"]}},
}


@pytest.mark.exact
@pytest.mark.parametrize(("case", "workers"), list(product(CASES, (1, 2, 3, 4))))
def test_units_have_one_value(pool: Pool, case: str, workers: int, programs: str) -> None:
    run = CASES[case]()
    whole = train_in_folder(run, programs)
    for sharding in ("none", "optimizer", "full"):
        ranks = pool.run(workers, train_in_folder, {**run, "sharding": sharding}, programs)
        assert ranks == [whole] * workers, sharding
    begun_by_shards = {**run, "sharding": "full", "rehearsal": "off"}
    assert pool.run(workers, train_in_folder, begun_by_shards, programs) == [whole] * workers


@pytest.mark.exact
@pytest.mark.parametrize(("sharding", "workers"), [("full", 3), ("optimizer", 2), ("none", 1)])
def test_units_outlive_a_kill(
    pool: Pool,
    sharding: str,
    workers: int,
    tmp_path: Path,
    programs: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", programs)
    saving = {"storage": str(tmp_path), "every": {"steps": 1}}
    whole = train(small())
    killed = Forked(train_and_die, small(checkpoint=saving), RUN, 4)
    assert killed.wait(300) == -signal.SIGKILL, killed.communicate()
    run = small(checkpoint=saving, sharding=sharding)
    origin = taken_up(str(tmp_path), None)
    for ended in pool.run(workers, go_on_in_folder, run, origin, programs):
        assert 0 < len(ended.digests) < len(whole.digests)
        assert ended.digests == whole.digests[-len(ended.digests) :]
        assert (ended.weights_digest, ended.identity) == (whole.weights_digest, whole.identity)


@pytest.mark.exact
def test_units_are_verified_by_the_command(
    programs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """G6: by one process, from a checkpoint."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", programs)
    saving = {"storage": str(tmp_path / "runs"), "every": {"steps": 2}, "keep_last": 9}
    run = lockstep.train(small(checkpoint=saving, record={"uri": "off", "digest_every": 1}), local=True)
    words = ("verify", Path(run.folder).name, "--uri", "off", "--storage", str(tmp_path / "runs"), "--local")
    code, shown, more = here(monkeypatch, capfd, tmp_path, *words, "--from", "4")
    assert code == 0, (shown, more)


def train_by_new_programs(run: Document, folder: str) -> Trained:
    """`train_in_folder`, which writes all programs there: inductor keeps those of an earlier run in this process, and writes none of them again."""
    from torch._inductor.utils import clear_caches

    clear_caches()
    return train_in_folder(run, folder)


def train_with_modes(run: Document, folder: str) -> Trained:
    """The control: what Lockstep sets over a sharded model is traced into the programs."""
    with mock.patch.object(compiled, "only_of_job", nullcontext):
        return train_by_new_programs(run, folder)


def programs_in(folder: Path) -> list[str]:
    """Their names, which follow from their text."""
    return sorted(path.name for path in folder.rglob("*.so"))


@pytest.mark.exact
def test_the_programs_of_a_sharded_run_are_those_of_a_whole_one(pool: Pool, tmp_path: Path) -> None:
    """In the control a unit has other programs in its forward than where it is computed again, which torch notices."""
    run = small(length={"steps": 1})
    sharded = {**run, "sharding": "full", "rehearsal": "off"}
    whole = train_by_new_programs(run, str(tmp_path / "whole"))
    assert pool.run(2, train_by_new_programs, sharded, str(tmp_path / "sharded")) == [whole] * 2
    assert programs_in(tmp_path / "sharded") == programs_in(tmp_path / "whole") != []
    with pytest.raises(JobError, match="Recomputed values"):
        pool.run(2, train_with_modes, sharded, str(tmp_path / "control"))


def marked_modules(run: Document) -> list[str]:
    """The modules of a sharded model that torch's compiler would trace as FSDP's: it takes a buffer of theirs for one that moves."""
    sharded: list[FullSharding] = []
    init = FullSharding.__init__

    def noted(self: FullSharding, *arguments: Any) -> None:
        init(self, *arguments)
        sharded.append(self)

    with mock.patch.object(FullSharding, "__init__", noted):
        train(run)
    modules = sharded[0].model.named_modules()
    return [name for name, module in modules if hasattr(module, "_is_fsdp_managed_module")]


@pytest.mark.scenario
def test_torchs_compiler_knows_no_module_as_one_of_fsdp(pool: Pool) -> None:
    run = small(compile=False, sharding="full", length={"steps": 1})
    assert pool.run(2, marked_modules, run) == [[], []]


# --- which modules --------------------------------------------------------------------------------------------------


def test_a_unit_computes_by_a_program_only_where_a_loss_does() -> None:
    """An evaluation and an export call the same modules. Where its activations are recomputed, the program is inside of that."""
    model, calls = Stack(), list[Callable[..., Any]]()

    def program(forward: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        calls.append(forward)
        return forward(*arguments, **keywords)

    assert compile_units(model, None) == ["blocks.0", "blocks.1", "blocks.2"]
    x = torch.ones(2, 8, requires_grad=True)
    model(x)
    assert not calls
    with compiled_units.computing_units(program):
        y = model(x)
        assert len(calls) == 3
        y.sum().backward()
    assert len(calls) == 5  # two are computed again
    model(x)
    assert len(calls) == 5


def test_units_are_named_by_patterns() -> None:
    assert compile_units(Stack(), ["blocks.*.into", "head"]) == [
        *(f"blocks.{i}.into" for i in range(3)),
        "head",
    ]


def test_a_model_without_blocks_is_refused() -> None:
    with raises(problems.NO_UNITS_TO_COMPILE):
        compile_units(nn.Linear(2, 2), None)


def test_a_unit_is_not_gathered_in_the_middle_of_a_program() -> None:
    model = Stack()
    names = compile_units(model, None)
    check_units_apart(model, names, None)
    check_units_apart(model, names, ["blocks"])
    with raises(problems.UNIT_INSIDE, got="blocks.0.into", name="blocks.0"):
        check_units_apart(model, names, ["blocks.*.into"])


def test_units_go_with_every_sharding() -> None:
    for sharding in ("none", "optimizer", "full"):
        assert load_spec(small(sharding=sharding)).document()["compile"] == "units"
