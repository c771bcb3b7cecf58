"""Where a model's tensors may lie: what is written to memory must be known to be one tensor's."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.tree import NAMES
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.memory_layout import check_layout, check_present
from lockstep.training.integrity.rehearsal.micro_batch import check_model
from tests.raised import raises


def test_two_parameters_in_one_piece_of_memory_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    check_layout(model)
    model["b"].weight.data = model["a"].weight.data
    with raises(problems.ONE_MEMORY, name="parameter 'b.weight'", other="parameter 'a.weight'"):
        check_layout(model)
    model["b"].weight = model["a"].weight
    check_layout(model)


def test_parts_of_one_storage_are_not_one_piece_of_memory() -> None:
    """Flat storages, as cuDNN's, and columns of one matrix; three rows that overlap by one are."""
    flat = torch.zeros(4, 6)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:2]), nn.Parameter(flat[2:, :3])
    model.third, model.empty = nn.Parameter(flat[2:, 3:]), nn.Parameter(flat[:0])
    model.register_buffer("mask", torch.zeros(2)[:1])
    check_layout(model)
    model.fourth = nn.Parameter(flat[1:3, 5])
    with raises(problems.ONE_MEMORY, name="parameter 'fourth'", other="parameter 'first'"):
        check_layout(model)


def test_what_is_made_in_inference_mode_is_refused() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("anchors", torch.ones(2))
    with raises(
        problems.TENSOR_FORM, name="buffer 'anchors'", got=re.compile("^was made in torch.inference_mode")
    ):
        check_layout(model)
    model.anchors = model.anchors.clone()
    check_layout(model)


def test_a_buffer_that_is_a_conjugate_view_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex64).conj())
    with raises(problems.TENSOR_FORM, name="buffer 'turns'", remedy=re.compile(r"\.resolve_conj\(\)")):
        check_layout(model)
    model.turns = model.turns.resolve_conj()
    check_layout(model)


def test_a_buffer_within_a_parameter_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("rows", model.weight.detach()[1:])
    with raises(problems.BUFFER_OF_PARAMETER, name="buffer 'rows'", other="parameter 'weight'"):
        check_layout(model)
    model.rows = model.rows.clone()
    model.register_buffer("again", model.rows.view(-1))  # two buffers are put back alike
    check_layout(model)


def test_sparse_and_expanded_buffers_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    with raises(
        problems.TENSOR_FORM, name="buffer 'adjacency'", got=re.compile("^is of the layout torch.sparse_coo")
    ):
        check_layout(model)
    model.adjacency = torch.ones(3).expand(2, 3)
    with raises(problems.TENSOR_FORM, name="buffer 'adjacency'", got=re.compile("^is expanded")):
        check_layout(model)
    model.adjacency = model.adjacency.contiguous()
    check_layout(model)


def test_shapes_that_are_not_there_yet_pass() -> None:
    check_layout(nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d(), nn.Linear(2, 2, device="meta")))


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


BYTES = re.compile(r"\.view\(torch\.uint8\)")
REAL = re.compile("torch.view_as_real")


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
)
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    ("tensor", "got", "remedy"),
    [
        (nested, "^is a nested tensor", re.compile("values and their lengths")),
        (jagged, "^is a nested tensor", re.compile("values and their lengths")),
        (lambda: torch.ones(2, dtype=torch.complex128), "^is of torch.complex128, which no file", REAL),
        (lambda: torch.ones(2).to(torch.complex32), "^is of torch.complex32", REAL),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
            "^is of torch.quint8",
            re.compile("int_repr"),
        ),
        (lambda: torch.ones(2).to(torch.float8_e8m0fnu), "^is of torch.float8_e8m0fnu", BYTES),
        (lambda: torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "^is of torch.float4", BYTES),
        (lambda: torch.ones(2, dtype=torch.uint8).view(torch.uint4), "^is of torch.uint4", BYTES),
    ],
)
def test_what_no_file_of_weights_can_hold_is_refused_before_training(
    tensor: Callable[[], Tensor], got: str, remedy: re.Pattern[str], persistent: bool
) -> None:
    """A buffer that `state_dict` leaves out as well: checkpoints have it all the same."""
    model = nn.Linear(2, 2)
    model.register_buffer("held", tensor(), persistent=persistent)
    with raises(problems.TENSOR_FORM, name="buffer 'held'", got=re.compile(got), remedy=remedy):
        check_model(model)


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_every_type_that_a_file_has_is_taken(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("held", torch.ones(2).to(dtype))
    model.register_parameter("frozen", nn.Parameter(torch.ones(2).to(dtype), requires_grad=False))
    check_model(model)


def test_a_tensor_without_values_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("held", torch.ones(2, device="meta"), persistent=False)
    with raises(problems.TENSOR_FORM, name="buffer 'held'", got=re.compile("^is on the meta device")):
        check_present(model)
    model.held = torch.ones(2)
    check_present(nn.Sequential(model, nn.LazyLinear(2)))
    with raises(problems.TENSOR_FORM, name="parameter 'weight'", got=re.compile("^is on the meta device")):
        check_present(nn.Linear(2, 2, device="meta"))


def test_the_name_that_safetensors_keeps_for_itself_is_refused() -> None:
    """A run would end well, and leave a file of weights that nothing reads."""
    for held in (nn.Buffer(torch.ones(2)), nn.Parameter(torch.ones(2))):
        model = nn.Linear(2, 2)
        model.__metadata__ = held
        with raises(problems.NAME_OF_FORMAT, got="__metadata__"):
            check_model(model)
        check_model(nn.Sequential(model))
    model = nn.Linear(2, 2)
    model.register_buffer("__metadata__", torch.ones(2), persistent=False)
    check_model(model)
