"""How parameters are shared out, and what an optimizer may be for it (G1)."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from lockstep.checkpoint.snapshot import snapshot, writers
from lockstep.checkpoint.tree import Elsewhere, pack
from lockstep.communication.group import Group
from lockstep.errors import Problem, SpecError
from lockstep.training.step import problems
from lockstep.training.step.element_wise import check_shardable
from lockstep.training.step.sharding import ShardedOptimizer, spans
from lockstep.training.step.span_gathering import UNIT, flat
from tests.raised import raises

PARAMETERS = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([2, 4, 8]), st.booleans()), max_size=12)


@given(PARAMETERS, st.integers(1, 9))
@example([(449, 2, True), (1, 2, False), (225, 2, False)], 3)
def test_every_element_has_one_owner(parameters: list[tuple[int, int, bool]], ranks: int) -> None:
    """Within a parameter in the order of the ranks; from one to the next it may go back, where rounding has gone too far."""
    lengths, widths, cut = ([one[i] for one in parameters] for i in range(3))
    found = spans(lengths, widths, cut, ranks)
    for i, length in enumerate(lengths):
        mine = [one for one in found if one.parameter == i]
        assert [e for one in mine for e in range(one.start, one.stop)] == list(range(length))
        assert all(one.start % UNIT == 0 for one in mine)
        assert cut[i] or len(mine) == 1
        assert [one.owner for one in mine] == sorted({one.owner for one in mine})


@pytest.mark.parametrize("ranks", range(1, 9))
def test_each_rank_has_as_many_bytes_as_the_others(ranks: int) -> None:
    lengths, widths = [50257 * 16, 1, 768, 12288, 65536, 7], [4, 8, 4, 2, 4, 4]
    found = spans(lengths, widths, [True] * 6, ranks)
    held = [
        sum((s.stop - s.start) * widths[s.parameter] for s in found if s.owner == r) for r in range(ranks)
    ]
    whole = sum(n * width for n, width in zip(lengths, widths, strict=True))
    assert all(abs(own - whole / ranks) <= UNIT * 8 for own in held)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("cut", [1, 7, 64, 1000, 33333])
def test_a_part_of_a_parameter_is_updated_to_the_bits_of_the_whole(kind: Any, cut: int) -> None:
    """What sharding stands on: these optimizers have the same bits for each element, wherever its tensor begins and ends."""
    more = {"momentum": 0.9, "nesterov": True} if kind is torch.optim.SGD else {}
    generator = torch.Generator().manual_seed(cut)
    start = torch.randn(40_003, generator=generator)
    gradients = [torch.randn(40_003, generator=generator) * 10.0**i for i in range(-2, 2)]
    ends = []
    for edges in ([0, 40_003], [0, cut, 40_003]):
        whole = start.clone()
        parts = [whole[a:b] for a, b in itertools.pairwise(edges)]
        optimizer = kind(parts, lr=0.01, weight_decay=0.1, **more)
        for gradient in gradients:
            for part, a, b in zip(parts, edges, edges[1:], strict=False):
                part.grad = gradient[a:b]
            optimizer.step()
        ends.append(whole)
    assert torch.equal(*ends)


class Normalised(torch.optim.SGD):
    """Adds up each gradient: not element by element."""


def test_what_is_not_element_by_element_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    for optimizer in (Normalised(model.parameters()), torch.optim.Adafactor(model.parameters())):
        with raises(
            problems.NOT_ELEMENT_WISE, got=type(optimizer).__name__, wanted=re.compile("^Adam, AdamW, SGD")
        ):
            check_shardable(optimizer, by_rows=False)
    hooked = torch.optim.SGD(model.parameters())
    hooked.register_step_post_hook(lambda *_: None)
    with raises(problems.NO_PARTS, name="SGD", got=re.compile("^has hooks")):
        check_shardable(hooked, by_rows=False)
    moved = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    moved.step()
    with raises(problems.NO_PARTS, got=re.compile("^comes with state")):
        check_shardable(moved, by_rows=False)


STRIDED = [
    torch.randn(3, 4),
    torch.randn(3, 4, 2, 2).contiguous(memory_format=torch.channels_last),
    torch.randn(4, 3).t(),
    torch.randn(()),
    torch.randn(0, 3),
]


@pytest.mark.parametrize("tensor", STRIDED, ids=lambda tensor: str(tensor.stride()))
def test_what_stands_for_a_tensor_leaves_the_same_skeleton(tensor: torch.Tensor) -> None:
    made = pack({"state": {0: {"exp_avg": torch.zeros_like(tensor)}}}).skeleton
    assert pack({"state": {0: {"exp_avg": Elsewhere.like(tensor, tensor.dtype)}}}).skeleton == made
    view = flat(tensor)
    assert view is not None
    assert view.numel() == tensor.numel()


def test_memory_with_gaps_has_no_flat_view() -> None:
    assert flat(torch.randn(3, 12)[:, ::2]) is None


META = torch.device("meta")
"""It stands for a GPU: a device that is not the processor."""

STEP = torch.tensor(7.0)


def on_a_gpu(**options: bool) -> tuple[ShardedOptimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(2, 65, device=META))
    whole = torch.optim.AdamW([{"params": [parameter], **options}])
    return ShardedOptimizer(whole, Group(rank=0, size=1, device=META)), parameter


@pytest.mark.parametrize("option", [{"fused": True}, {"capturable": True}, {}], ids=str)
def test_a_step_count_is_loaded_to_where_the_kernels_read_it(option: dict[str, bool]) -> None:
    """As torch's own `load_state_dict` does: fused and captured kernels read it on the device, all others on the processor."""
    optimizer, parameter = on_a_gpu(**option)
    saved = {"step": STEP, "exp_avg": torch.zeros(2, 65), "exp_avg_sq": torch.zeros(2, 65)}
    groups = optimizer.groups_as_saved()
    optimizer.load_state_dict({"state": {0: saved}, "param_groups": groups})
    (own,) = optimizer.own_state().values()
    torchs = torch.optim.AdamW([parameter])
    torchs.load_state_dict({"state": {0: saved}, "param_groups": groups})
    assert {name: value.device for name, value in own.items()} == {
        name: value.device for name, value in torchs.state[parameter].items()
    }
    assert own["step"] is not STEP


class OnTheGpu(torch.Tensor):
    """A number that lies on a GPU, until it is copied to the processor."""

    def cpu(self, *_: Any) -> torch.Tensor:
        return STEP.clone()


def test_a_step_count_leaves_the_gpu_before_it_goes_to_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA tensor that is pickled appears on the device of its sender's number."""
    optimizer, _ = on_a_gpu(fused=True)
    optimizer._build()
    (part,) = optimizer._parts.values()
    optimizer._own.state[part.value] = {"step": torch.zeros(()).as_subclass(OnTheGpu)}
    gathered: list[Any] = []
    monkeypatch.setattr(Group, "gather", lambda self, value: gathered.append(value) or [value])
    assert optimizer.state_dict()["state"] == {0: {"step": STEP}}
    assert type(gathered[0][0]["step"]) is torch.Tensor


def test_a_rank_that_lacks_what_it_writes_is_found_out() -> None:
    place = Elsewhere.like(torch.zeros(8), torch.float32)
    assert writers({"optimizer": {"a": place}}, 2) == {id(place): 0}
    with pytest.raises(RuntimeError, match="rank 0 was not given 1 of the tensors that it writes"):
        snapshot({"optimizer": {"a": place}}, ranks=2)


class Signed(torch.optim.Optimizer):
    """Sign descent with a momentum, each element by itself; `wrong` breaks that in a way that a run would not show at once."""

    elementwise = True

    def __init__(self, params: Any, wrong: str = "") -> None:
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.99), "heat": torch.ones(())})
        self.wrong = wrong

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.1)
                update = momentum.sign()
                if self.wrong == "norm":
                    update = update / p.grad.norm()
                if self.wrong == "draws":
                    update = update + torch.randn_like(p)
                if self.wrong == "state":
                    state["rows"] = torch.zeros(3)
                if self.wrong == "group":
                    group["lr"] *= 0.9
                if self.wrong == "key":
                    group["steps"] = group.get("steps", 0) + 1
                if self.wrong == "tuple":
                    group["betas"] = (group["betas"][0] * 0.9, 0.99)
                if self.wrong == "tensor":
                    group["heat"].mul_(0.9)
                if self.wrong == "second" and group is not self.param_groups[0]:
                    group["lr"] *= 0.9
                if self.wrong == "attribute":
                    self.updates = getattr(self, "updates", 0) + 1
                if self.wrong == "matrix" and p.dim() == 2:
                    update = update * 2
                if self.wrong == "kernel" and p.dim() == 4:
                    update = update * 2
                p.add_(update, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("wrong", "problem", "words"),
    [
        ("norm", problems.PARTS_DIFFER, "updates a row of numbers otherwise"),
        ("draws", problems.NO_PARTS, "changes the generator of random numbers in its updates"),
        ("state", problems.NO_PARTS, "keeps 'rows' of the shape (3,)"),
        ("group", problems.NO_PARTS, "changes lr in its updates"),
        ("key", problems.NO_PARTS, "changes steps in its updates"),
        ("tuple", problems.NO_PARTS, "changes betas in its updates"),
        ("tensor", problems.NO_PARTS, "changes heat in its updates"),
        ("second", problems.NO_PARTS, "changes lr in its updates"),
        ("attribute", problems.NO_PARTS, "changes updates in its updates"),
        ("matrix", problems.NO_PARTS, "updates a matrix otherwise than a row"),
        ("kernel", problems.NO_PARTS, "updates a matrix otherwise than a row"),
    ],
)
def test_an_own_optimizer_that_says_it_is_elementwise_is_tried(
    wrong: str, problem: Problem[SpecError], words: str
) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(3))]} for _ in range(2)]
    check_shardable(Signed([dict(group) for group in groups]), by_rows=False)
    optimizer = Signed(groups, wrong)
    with raises(problem, name="Signed", got=re.compile(re.escape(words))):
        check_shardable(optimizer, by_rows=False)
    if wrong in ("matrix", "kernel"):  # a worker has rows of it under `full`
        check_shardable(optimizer, by_rows=True)
    assert float(optimizer.param_groups[0]["heat"]) == 1.0


class Scaled(torch.optim.Optimizer):
    """A descent that has a factor for each parameter, where `by` says."""

    elementwise = True

    def __init__(self, params: Any, by: str, **of_group: Any) -> None:
        super().__init__(params, {"lr": 0.1, **of_group})
        self.by = by

    def scale(self, group: dict[str, Any], i: int) -> float:
        if self.by == "names":
            return 0.5 if group["param_names"][i] == "1.bias" else 1.0
        if self.by == "attributes":
            return float(group["params"][i].scale)
        if self.by == "list":
            return float(group["scales"][i])
        if self.by == "place":
            return 0.5 if i > 2 else 1.0
        return 1 / sum(p.numel() > 0 for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                p.add_(p.grad, alpha=-self.scale(group, i) * group["lr"])


@pytest.mark.parametrize("by_rows", [False, True])
def test_an_own_optimizer_may_have_a_factor_for_each_parameter(by_rows: bool) -> None:
    """By its name, an attribute, or its place in the group, at which it is on every worker; not by how many a worker has."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for p in model.parameters():
        p.scale = 0.5  # type: ignore[attr-defined]
    for by in ("names", "attributes", "list", "place"):
        optimizer = Scaled(model.named_parameters(), by, scales=[1.0, 0.25, 1.0, 0.5])
        check_shardable(optimizer, by_rows=by_rows)
    with raises(problems.NO_PARTS, got=re.compile("^updates a parameter otherwise where others")):
        check_shardable(Scaled(model.parameters(), "count"), by_rows=by_rows)


def test_a_method_of_the_optimizer_itself_is_refused() -> None:
    """A part's optimizer would not have it, or would call the one that updates whole parameters."""
    for kind in (Signed, torch.optim.AdamW):
        optimizer = kind([nn.Parameter(torch.ones(3))])
        check_shardable(optimizer, by_rows=True)
        optimizer.step = lambda: None  # type: ignore[method-assign]
        with raises(problems.NO_PARTS, got=re.compile("^has a step of its own")):
            check_shardable(optimizer, by_rows=True)


def test_an_own_optimizer_that_holds_parameters_elsewhere_is_refused() -> None:
    """A trial would not show it: what it wraps updates the whole parameters, which are not tried."""
    parameters = [nn.Parameter(torch.ones(3))]
    wrapping, listing = Signed(parameters), Signed(parameters)
    wrapping.base = torch.optim.SGD(parameters, lr=0.1)  # type: ignore[attr-defined]
    listing.every = [parameters]  # type: ignore[attr-defined]
    knowing, mapping = Signed(parameters), Signed(parameters)
    knowing.undecayed = {id(p) for p in parameters}  # type: ignore[attr-defined]
    mapping.scales = {id(p): 0.1 for p in parameters}  # type: ignore[attr-defined]
    cases = (wrapping, "base"), (listing, "every"), (knowing, "undecayed"), (mapping, "scales")
    for optimizer, name in cases:
        with raises(problems.NO_PARTS, got=re.compile(f"in its attribute '{name}', which")):
            check_shardable(optimizer, by_rows=False)


def test_a_search_along_a_line_is_named() -> None:
    with raises(
        problems.NOT_ELEMENT_WISE, got="LBFGS", reason=re.compile("dot products over all parameters")
    ):
        check_shardable(torch.optim.LBFGS([nn.Parameter(torch.ones(3))]), by_rows=True)
