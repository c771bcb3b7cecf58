"""Where a model's tensors lie: each in dense memory, of a type that files of weights have, each element of a parameter in one tensor alone.

Buffers are put back after every micro-batch, and parameters are updated and averaged one by one. Both write to memory, so
it must be known whose memory that is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.checkpoint.tree import NAMES
from lockstep.training.failure import job_at
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.object_state import same_bits


def check_layout(model: nn.Module) -> None:
    """JobError for a parameter or buffer that is not dense, whose type no file has, whose elements share memory, or that shares memory with a parameter."""
    named: list[tuple[str, Tensor]] = [
        (f"parameter {name!r}", value) for name, value in model.named_parameters()
    ]
    named += [(f"buffer {name!r}", value) for name, value in model.named_buffers()]
    there = {what: tensor for what, tensor in named if not nn.parameter.is_lazy(tensor)}
    for what, tensor in there.items():
        if tensor.is_nested:
            raise problems.TENSOR_FORM(
                name=what,
                got="is a nested tensor, which is neither compared nor put back",
                remedy="hold its values and their lengths in two buffers, and make the nested tensor from them in the forward",
            )
        if tensor.layout != torch.strided:
            raise problems.TENSOR_FORM(
                name=what,
                got=f"is of the layout {tensor.layout}, which is neither compared nor put back",
                remedy="hold it dense, or as indices and values in two buffers, and make the sparse tensor from them in the forward",
            )
        if tensor.dtype not in NAMES:
            raise problems.TENSOR_FORM(
                name=what,
                got=f"is of {tensor.dtype}, which no file of weights can hold",
                remedy=_storable_form(tensor),
            )
        if tensor.is_inference():
            raise problems.TENSOR_FORM(
                name=what,
                got="was made in torch.inference_mode(), so torch counts no writes to it",
                remedy="make it in torch.no_grad(), or give a copy that is made outside: .clone()",
            )
        if tensor.is_conj() or tensor.is_neg():
            raise problems.TENSOR_FORM(
                name=what,
                got="is a view that torch conjugates or negates when it is read, so its bits are not its values",
                remedy="hold the values: .resolve_conj().resolve_neg()",
            )
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise problems.TENSOR_FORM(
                name=what,
                got="is expanded: several of its elements are one number in memory, which cannot be written to",
                remedy="give each its own: .contiguous()",
            )
    plain = {what: value for what, value in there.items() if _has_address(value)}
    preceding: list[tuple[str, Tensor]] = []
    for what, tensor in sorted(plain.items(), key=lambda item: item[1].data_ptr()):
        preceding = [(label, value) for label, value in preceding if _end(value) > tensor.data_ptr()]
        for label, value in preceding:
            if _overlap(value, tensor):
                _refuse(*sorted((label, what), reverse=True))
        preceding.append((what, tensor))


def _storable_form(tensor: Tensor) -> str:
    """How to hold the content of a tensor whose type safetensors has no name for."""
    if tensor.is_quantized:
        return "hold its int_repr(), scale and zero point as buffers, or quantize the finished weights"
    if tensor.is_complex():
        return "hold it as torch.complex64, or as real numbers: torch.view_as_real"
    return "hold its bytes, .view(torch.uint8), and view them as this type in the forward"


def check_present(model: nn.Module) -> None:
    """JobError for a parameter or buffer on the meta device."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta and not nn.parameter.is_lazy(tensor):
                raise problems.TENSOR_FORM(
                    name=f"{kind} {name!r}",
                    got="is on the meta device, so it has no values",
                    remedy="make it without device='meta', or fill it in job.model()",
                )


def check_listed(model: nn.Module, where: str) -> None:
    """JobError where the model's `state_dict` gives other bits for a parameter or buffer than it has; `where` is the place in the run."""
    with job_at("in state_dict of the model"):
        listed = model.state_dict(keep_vars=True)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        entry = listed.get(name, tensor)
        if entry is tensor or not isinstance(entry, Tensor) or nn.parameter.is_lazy(tensor):
            continue
        if not same_bits(entry, tensor):
            raise problems.STATE_CONVERTED(name=name, got=entry.dtype, wanted=tensor.dtype, where=where)


def _refuse(one: str, other: str) -> None:
    """Raise JobError for two that share memory, unless both are buffers; in reverse order, so a buffer comes second."""
    if one.startswith("buffer"):
        return
    if other.startswith("buffer"):
        raise problems.BUFFER_OF_PARAMETER(name=other, other=one)
    raise problems.ONE_MEMORY(name=one, other=other)


def _has_address(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta" and tensor.numel() > 0


def _elements(tensor: Tensor) -> int:
    """From the first element in memory to the last one."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + _elements(tensor) * tensor.element_size()


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors, of which the second begins within the first, have an element in common: columns of one matrix have none."""
    size = first.element_size()
    ahead, remainder = divmod(second.data_ptr() - first.data_ptr(), size)
    if remainder or second.element_size() != size:
        return True
    taken = torch.zeros(max(_elements(first), ahead + _elements(second)), dtype=torch.bool)
    taken.as_strided(first.shape, first.stride()).fill_(True)
    return bool(taken.as_strided(second.shape, second.stride(), ahead).any())
