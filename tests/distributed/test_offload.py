"""G1 with `sharding.offload`: where a worker keeps its rows is placement, and nothing is computed with them there.

On a CPU the device's memory is the host's. A GPU would refuse to compute with a tensor that lies elsewhere; here that is watched for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import SpecError
from lockstep.spec.loading import load_spec
from lockstep.training.step import host_memory, problems
from lockstep.training.step.full_sharding import FullSharding
from lockstep.training.step.host_memory import HostMemory
from lockstep.training.step.optimizer_step import Stepper
from tests.distributed import elementwise_jobs, phase_kinds, test_same_bits
from tests.distributed import kinds as kinds_of_jobs
from tests.distributed.pool import Pool
from tests.distributed.test_full_sharding import (
    RUN,
    attempt_with_many_writers,
    check_phased,
    content,
    folder,
    kinds,
    reference,
    saving,
)
from tests.distributed.test_resume import taken_up
from tests.distributed.training import Document, Trained, train, train_and_die
from tests.raised import raises

OFFLOADED = {"mode": "full", "offload": True}


def offloaded(document: Document, **more: Any) -> Document:
    return {**document, "sharding": {**OFFLOADED, **more}}


def train_in_small_portions(document: Document) -> Trained:
    """A few of these small tensors at a time."""
    with mock.patch.object(host_memory, "PORTION_BYTES", 200):
        return train(document)


# --- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(("kind", "workers"), list(product(("adamw", "sgd", "recomputed"), (1, 2, 3, 4))))
def test_no_bit_depends_on_where_the_rows_lie(pool: Pool, kind: str, workers: int) -> None:
    """With an average, clipping, an evaluation that decides, and parameters that stay on the device."""
    assert pool.run(workers, train_in_small_portions, offloaded(kinds(kind))) == [reference(kind)] * workers


@pytest.mark.scenario
@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("precision", "job", "workers"), list(product(("fp16", "bf16", "fp32"), ("gpt", "digits"), (2, 3, 4)))
)
def test_no_bit_of_a_precision_does(pool: Pool, precision: str, job: str, workers: int) -> None:
    """fp16 unscales gradients, and agrees on those that overflowed."""
    document = offloaded(test_same_bits.document(job, 8, precision))
    assert pool.run(workers, train, document) == [test_same_bits.reference(job, 8, precision)] * workers


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ({"reshard_after_forward": False, "prefetch": 2}, 2),
        ({"units": ["blocks.*.into", "head"], "prefetch": 0}, 3),
        ({"prefetch": 3}, 2),
        ({"units": ["Block"]}, 4),
    ],
)
def test_units_may_be_any(pool: Pool, settings: Document, workers: int) -> None:
    assert pool.run(workers, train, offloaded(kinds("adamw"), **settings)) == [reference("adamw")] * workers


@pytest.mark.scenario
def test_optimizers_of_the_job_s_own_and_phases(pool: Pool) -> None:
    """An optimizer that counts its calls gets all rows in one; a generator rests in some steps."""
    check_phased(
        pool,
        [
            phase_kinds.WassersteinWithPenalty,
            phase_kinds.UnfrozenLayerByLayer,
            elementwise_jobs.LionInTwoGroups,
        ],
        OFFLOADED,
        2,
    )


# --- killed, and taken up -----------------------------------------------------------------------------------------

SHARDINGS: list[Any] = ["none", "optimizer", "full", OFFLOADED]


def killed(pool: Pool, workers: int, document: Document, step: int) -> None:
    """A first attempt in which each rank that tells of `step` gets SIGKILL."""
    with pytest.raises(Exception) as end:
        pool.run(workers, train_and_die, document, RUN, step)
    assert "ended with -9" in " ".join([str(end.value), *getattr(end.value, "__notes__", ())])


@pytest.mark.scenario
@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("before", "after", "workers", "others"),
    [
        *((OFFLOADED, sharding, 2, others) for sharding, others in zip(SHARDINGS, (1, 3, 3, 4), strict=True)),
        *(
            (sharding, OFFLOADED, workers, 2)
            for sharding, workers in zip(SHARDINGS[:3], (1, 2, 3), strict=True)
        ),
    ],
)
def test_a_killed_run_is_taken_up_whatever_keeps_the_rows(
    pool: Pool, tmp_path: Path, before: Any, after: Any, workers: int, others: int
) -> None:
    wanted = reference("adamw")
    killed(pool, workers, saving(tmp_path, before), 3)
    origin = taken_up(str(tmp_path), None)
    for ended in pool.run(others, attempt_with_many_writers, saving(tmp_path, after), origin):
        assert (ended.rows, ended.identity) == (wanted.rows, wanted.identity)
        assert 0 < len(ended.digests) < len(wanted.digests)
        assert ended.digests == wanted.digests[-len(ended.digests) :]
        assert ended.best == wanted.best != (None, None)


@pytest.mark.scenario
def test_a_checkpoint_holds_what_it_does_without(pool: Pool, tmp_path: Path) -> None:
    contents = []
    for sharding, workers in (("none", 1), (OFFLOADED, 3)):
        storage = tmp_path / str(workers)
        pool.run(workers, attempt_with_many_writers, saving(storage, sharding), AttemptOrigin())
        contents.append(content(storage))
    assert contents[0] == contents[1] != {}
    assert folder(tmp_path / "3").claim().number == 2


# --- nothing is computed in host memory ---------------------------------------------------------------------------

_COPIES = {"copy_", "_to_copy", "_foreach_copy_", "clone", "all_gather_copy_in"}
_MEMORY = {"empty_like", "new_empty", "new_empty_strided"}
_VIEWS = {"detach", "alias", "view", "_unsafe_view", "as_strided", "narrow", "select", "permute", "expand"}
_MOVES = _COPIES | _MEMORY | _VIEWS | {"slice", "split", "split_with_sizes", "unsqueeze"}
"""What may be done with a tensor in host memory: all that moves its values, or looks at it in another shape. FSDP itself copies rows to the device as it gathers them."""


class Watch(TorchDispatchMode):
    """Notes the operators that compute with rows in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}
        """All tensors in host memory by their address, which none gets again meanwhile."""
        self.seen = set[str]()
        self.moved = 0

    def keep(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self.kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [
            leaf for leaf in tree_leaves((args, kwargs or {})) if type(leaf) in (Tensor, torch.nn.Parameter)
        ]
        if any(tensor.untyped_storage().data_ptr() in self.kept for tensor in tensors):
            name = func.__name__.split(".")[0]
            self.moved += name in _MOVES
            if name not in _MOVES:
                self.seen.add(name)
        return func(*args, **(kwargs or {}))


def watched(document: Document, broken: str = "") -> tuple[set[str], int]:
    """What a run computes in host memory in its steps, and how often it moves something. `broken` names the call of `HostMemory` that makes no copy."""
    watch, empty, init, step = Watch(), HostMemory.empty, FullSharding.__init__, Stepper.__call__

    def noted(self: FullSharding, *given: Any) -> None:
        init(self, *given)
        for name in self.shards:
            watch.keep(self.local[name].detach())

    def kept(self: HostMemory, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return watch.keep(empty(self, shape, dtype))

    def taken(self: Stepper, *given: Any, **named: Any) -> Any:
        with watch:
            return step(self, *given, **named)

    with (
        mock.patch.object(HostMemory, "empty", kept),
        mock.patch.object(FullSharding, "__init__", noted),
        mock.patch.object(Stepper, "__call__", taken),
        mock.patch.multiple(HostMemory, **BROKEN[broken]),
    ):
        train(document)
    return watch.seen, watch.moved


def _update_where_they_lie(self: HostMemory, optimizer: torch.optim.Optimizer, rows: Any) -> None:
    optimizer.step()


def _compute_where_they_lie(self: HostMemory, rows: Any, compute: Callable[..., object]) -> None:
    compute(*map(list, zip(*rows, strict=True)))


def _as_it_is(self: HostMemory, tensor: Tensor) -> Tensor:
    return tensor.detach()


BROKEN: dict[str, dict[str, Any]] = {
    "": {"update": HostMemory.update},
    "update": {"update": _update_where_they_lie},
    "in_turn": {"in_turn": _compute_where_they_lie},
    "on_device": {"on_device": _as_it_is},
}


def watched_document(precision: str) -> Document:
    """Without digests, whose sums of words move to the device first, which on a CPU is where they are."""
    plain = {"record": {"digest_every": None}, "determinism": {"mode": "strict", "recheck": 0}}
    return offloaded({**kinds("adamw"), **plain, "precision": precision})


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_nothing_is_computed_with_rows_in_host_memory(pool: Pool, precision: str) -> None:
    for seen, moved in pool.run(2, watched, watched_document(precision)):
        assert seen == set()
        assert moved > 500


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("broken", "operator"),
    [("update", "addcdiv_"), ("in_turn", "_foreach_mul_"), ("on_device", "_foreach_add_")],
)
def test_a_computation_in_host_memory_is_noticed(pool: Pool, broken: str, operator: str) -> None:
    """The controls."""
    for seen, _ in pool.run(2, watched, watched_document("fp32"), broken):
        assert operator in seen, seen


def test_one_worker_is_told_that_it_offloads_nothing() -> None:
    (told,) = [text for text in train(offloaded(kinds("adamw"))).warnings if text.startswith("sharding")]
    assert told.startswith("sharding.offload: one worker shares nothing out")


# --- what it does not go with -------------------------------------------------------------------------------------


def test_mirrors_are_refused() -> None:
    with pytest.raises(SpecError, match=r"^sharding.offload: got true with faults.mirror true"):
        load_spec(offloaded({**kinds("adamw"), "faults": {"mirror": True}}))


def test_an_optimizer_that_evaluates_the_loss_again_is_refused() -> None:
    document = offloaded(kinds_of_jobs.document(elementwise_jobs.LooksAhead))
    with raises(problems.CLOSURE_OFFLOAD):
        train(document)


# --- the tensors themselves ---------------------------------------------------------------------------------------


@cache
def _updated(in_host: bool, kind: Any) -> list[Tensor]:
    """Weights, state and gradients after three updates, of which one skips a parameter."""
    generator = torch.Generator().manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(n, 3, generator=generator)) for n in (5, 1, 40, 7)]
    optimizer, memory = kind(parameters), HostMemory(torch.device("cpu"))
    addresses = [parameter.data_ptr() for parameter in parameters]
    for number in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if number == 1:
            parameters[2].grad = None
        step = partial(memory.update, optimizer, parameters[1:]) if in_host else optimizer.step
        step()
    assert [parameter.data_ptr() for parameter in parameters] == addresses
    states = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*(p.detach() for p in parameters), *(v for v in states if isinstance(v, Tensor)), *gradients]


@pytest.mark.parametrize("portion", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    "kind",
    [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), partial(torch.optim.AdamW, fused=True)],
)
def test_an_update_by_portions_is_that_of_all(
    portion: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters stay in their memory, and so does their state; what lies on the device is updated once."""
    monkeypatch.setattr(host_memory, "PORTION_BYTES", portion)
    _updated.cache_clear()
    found, wanted = _updated(True, kind), _updated(False, kind)
    assert len(found) == len(wanted) > 8
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
