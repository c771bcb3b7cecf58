"""What training refuses where a whole run would take long to come to it: each is told as the problem that it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Mean
from lockstep.communication.credentials import Secret
from lockstep.communication.group import Group
from lockstep.spec.loading import load_spec
from lockstep.training import problems
from lockstep.training.auxiliary_state import beside_path, load_beside
from lockstep.training.elastic import problems as elastic_problems
from lockstep.training.elastic.membership import Dismissed
from lockstep.training.elastic.rendezvous import RendezvousHandler
from lockstep.training.evaluation.evaluator_messages import Beginning
from lockstep.training.evaluation.serving import _serve
from lockstep.training.identity_inputs import Inputs
from lockstep.training.integrity.digests import Digester
from lockstep.training.optimizer_state import restore_optimizer
from lockstep.training.read_relay import Relay
from lockstep.training.run_facts import _own_fields
from lockstep.training.step import problems as step_problems
from lockstep.training.step.closures import Closure
from lockstep.training.step.compiled import Program
from lockstep.training.step.fsdp_collectives import not_once
from lockstep.training.step.full_sharding import FullSharding, advised, diverged
from lockstep.training.step.phase_step import PhaseStep
from lockstep.training.step.sample_rows import StepRows
from lockstep.training.step.sharded_modes import NoShards
from lockstep.training.step.statistics import own_statistics
from lockstep.training.step.weight_average import Average
from tests.distributed.small_jobs import Plain
from tests.raised import Refusal, check_refusal, each_refusal, raises

USE = "tests.distributed.small_jobs:Plain"
CPU = torch.device("cpu")


def spec(storage: Path) -> dict[str, Any]:
    document = {
        "job": {"use": USE}, "batch": {"global": 8, "micro": 4}, "length": {"steps": 2}, "rehearsal": "off",
        "checkpoint": {"storage": str(storage)},
    }  # fmt: skip
    return load_spec(document).document()


def leaves(folder: Path) -> None:
    """A worker that the run does without."""
    keeper: Any = SimpleNamespace(
        ready=lambda: None, arrive=lambda *_: None, ask=lambda _: Dismissed(), called=lambda: None
    )
    with RendezvousHandler(
        1, 0, "127.0.0.1", Secret(bytes(32)), keeper, lambda *_: None, lambda: None
    ) as handler:
        handler.regroup(None, None)  # type: ignore[arg-type]


def another_run(folder: Path) -> None:
    beginning = Beginning(spec(folder), "cpu", {"seed": 5}, {})
    _serve(SimpleNamespace(recv=lambda: beginning), 0)  # type: ignore[arg-type]


def torn(folder: Path) -> None:
    path = folder / "final.safetensors"
    beside_path(path).write_bytes(b"torn")
    load_beside(path)


def of_phases(_: Path) -> None:
    """A checkpoint of two phases for a job of one."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    restore_optimizer(optimizer, {"maker": {}, "judge": {}}, fork=True)


class Locked(Plain):
    def identity(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


def other_inputs(folder: Path) -> None:
    """Two ranks that have read another value of a variable."""
    loaded = load_spec(spec(folder))
    inputs = Inputs(loaded, Plain(Plain.Params()), {"fields": {}})
    every = [{"variable.A": "1"}, {"variable.A": "2"}]
    group: Any = SimpleNamespace(size=2, gather=lambda _: every)
    inputs.agree(group, {"fields": every[0]}, 1, lambda _: None)


def other_bytes(_: Path) -> None:
    """Rank 1 asks for another file than the one that rank 0 answers for."""
    relay: Any = SimpleNamespace(
        reads=False, _group=SimpleNamespace(rank=1), move=lambda tensor: tensor.zero_()
    )
    Relay.hand(relay, "manifest.json", lambda: None)


def another_average(_: Path) -> None:
    Average(nn.Linear(2, 3), 0.9).load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)})


def unlike_calls(_: Path) -> None:
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])
    Closure(optimizer, 9, 0.0, lambda _: 0.0, [], Digester(CPU), CPU).check([2, 3])


def shard(_: Path) -> None:
    weight: Any = torch.zeros(1)
    weight.to_local = lambda: weight
    with NoShards():
        torch.add(weight, 1)


def twice_differentiated(_: Path) -> None:
    """A gradient that came after that of its module was sent."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    sharding: Any = SimpleNamespace(_gathered={"0.weight": weight}, _writes=[weight._version])
    FullSharding.end_pass(sharding, "step 1")


def not_gathered(_: Path) -> None:
    with advised():
        raise step_problems.NOT_GATHERED(got="add")


def no_rows(_: Path) -> None:
    """Each micro-batch of the step has lost its samples."""
    StepRows(Group(0, 1, CPU), lambda count: [], "job.embed").gather()


def uncompiled(_: Path) -> None:
    """A machine without a compiler."""
    with warnings.catch_warnings():  # of torch's own imports
        warnings.simplefilter("ignore", DeprecationWarning)
        Program(lambda x: x.sin() * 1.234567, {"cpp.cxx": ("/nowhere/g++",), "fx_graph_cache": False})(
            torch.ones(3)
        )


def summed_alone(_: Path) -> None:
    phase: Any = SimpleNamespace(names=[], parameters=[])
    raise PhaseStep.without_gradient(phase, "step 1")


def raised(error: BaseException) -> None:
    raise error


CALLS: list[Refusal] = [
    (leaves, elastic_problems.LEFT, {}),
    (another_run, problems.OTHER_EVALUATOR, {}),
    (torn, problems.AUXILIARY_UNREADABLE, {}),
    (of_phases, problems.FORK_PHASES, {"wanted": "['judge', 'maker']", "got": "[]"}),
    (lambda _: _own_fields(Locked(Plain.Params())), problems.IDENTITY_CONTENT, {"kind": "_thread.lock"}),
    (other_inputs, problems.INPUTS_DIFFER, {"name": "variable.A", "rank": 1, "got": "'2'", "wanted": "'1'"}),
    (other_bytes, problems.OTHER_BYTES, {"rank": 1, "what": "manifest.json"}),
    (another_average, step_problems.AVERAGE_SHAPE, {"name": "weight", "got": "(2, 2)", "wanted": "(3, 2)"}),
    (unlike_calls, step_problems.CLOSURE_DIFFERS, {"name": "LBFGS", "got": "2, 3"}),
    (lambda _: own_statistics([1], "job.step_statistics"), step_problems.STATISTICS_KIND, {"what": "returned", "got": "list"}),
    (lambda _: own_statistics({"a": Mean(1, 1), "b": 2}, "job.step_statistics"), step_problems.STATISTICS_KIND, {"got": "int"}),
    (shard, step_problems.NOT_GATHERED, {"got": "add"}),
    (not_gathered, step_problems.ONLY_GATHERED, {"got": re.compile("^add of a parameter that is not gathered")}),
    (twice_differentiated, step_problems.GRADIENT_WENT_ON, {"name": "0.weight", "where": "step 1"}),
    (no_rows, step_problems.NO_ROWS, {"label": "job.embed"}),
    (lambda _: raised(diverged("step 3")), step_problems.DIVERGED, {"where": "step 3"}),
    (lambda _: raised(not_once(["a.weight"], 2, "step 3")), step_problems.COMPUTED_AGAIN, {"name": "a.weight", "got": 2}),
    (summed_alone, step_problems.SUMMED_ALONE, {"where": "step 1"}),
]  # fmt: skip


@each_refusal(CALLS)
def test_a_refusal_is_told_as_its_problem(refusal: Refusal, tmp_path: Path) -> None:
    check_refusal(refusal, tmp_path)


@pytest.mark.scenario
def test_a_machine_without_a_compiler_compiles_nothing(tmp_path: Path) -> None:
    with raises(step_problems.NOT_COMPILED):
        uncompiled(tmp_path)


PROCESS = """
from lockstep.errors import LockstepError
from lockstep.training.determinism import determinism
try:
    with determinism({kind!r}, {threads}):
        print("set")
except LockstepError as error:
    print(error.code, dict(error.facts))
"""


@pytest.mark.parametrize(
    ("kind", "threads", "variables", "code"),
    [
        ("strict", 1, {"PYTHONHASHSEED": "7"}, problems.HASH_SEED.code),
        pytest.param("fast", 2, {"OMP_THREAD_LIMIT": "1"}, problems.THREADS.code, marks=pytest.mark.scenario),
        pytest.param("fast", 2, {}, "set", marks=pytest.mark.scenario),
    ],
)
def test_a_process_that_cannot_be_made_deterministic_is_refused(
    kind: str, threads: int, variables: dict[str, str], code: str
) -> None:
    """What a process was started with cannot be changed in it: so another one is asked."""
    ran = subprocess.run(
        [sys.executable, "-c", PROCESS.format(kind=kind, threads=threads)],
        env={**os.environ, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.match(rf"{re.escape(code)}\b", ran.stdout), ran.stdout
