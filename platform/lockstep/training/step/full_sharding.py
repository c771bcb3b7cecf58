"""Parameters, gradients and the optimizer's state shared out over the workers, with the bits of a model that every worker holds.

torch's FSDP2 (`fully_shard`) gathers the parameters of a unit before it computes, lets go of them after it, and hands the gradients of a
micro-batch to a reduction of ours. The workers go through a step together: in pass j worker r of W computes micro-batch j·W + r, so that what one
reduction brings together are W neighbouring leaves of the tree. Each worker gets its rows of all W leaves, and adds them up along the tree:
the additions of one process, on rows.

Invariants: all workers gather and reduce the same units in the same order, in every pass, whatever they compute; a worker without a micro-batch in a
pass computes the first one of it again, and nobody counts that. What FSDP cannot cut to the bit stays whole on every worker (`whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.checkpoint.stored_tensor import in_memory
from lockstep.checkpoint.tree import Elsewhere
from lockstep.communication.group import Group
from lockstep.errors import JobError
from lockstep.spec.sharding import Sharding
from lockstep.tensor_bytes import row_of
from lockstep.training.step import problems
from lockstep.training.step.fsdp_collectives import Gather, Observe, Scatter, all_gather, not_once
from lockstep.training.step.fsdp_modules import (
    Root,
    in_order_of_fsdp,
    places_of,
    put,
    shard_modules,
    undo,
    whole_in_state_dicts,
)
from lockstep.training.step.host_memory import HostMemory
from lockstep.training.step.parameters import missing_gradient, noted_on, written_parameter
from lockstep.training.step.reduction import TreeSum
from lockstep.training.step.sharded_modes import NoShards, WholeGradients
from lockstep.training.step.sharding_units import Calls, members_of, units_of
from lockstep.training.step.shards import Shard, element_ranges
from lockstep.training.step.uncut_parameters import uncut, unit_bytes

if TYPE_CHECKING:
    from lockstep.training.step.fsdp_calls import FSDPCalls

T = TypeVar("T")

_CALLS = (
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
)


def check_torch() -> None:
    """SpecError where this torch lacks a call of FSDP2, or of its graphs, that full sharding needs."""
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError:
        missing = "fully_shard"
    else:
        needed: dict[Any, Sequence[str]] = {
            FSDPModule: _CALLS,
            FSDPState: ("_pre_backward", "_register_pre_backward_hook"),
            torch._C: ("_current_graph_task_id",),
            torch._C._autograd: ("_get_sequence_nr",),
            torch.autograd.graph.Node: ("_sequence_nr",),
        }
        missing = next(
            (name for owner, names in needed.items() for name in names if not hasattr(owner, name)), ""
        )
    if missing:
        raise problems.NO_FSDP(got=torch.__version__, missing=missing)


_DEFAULT = Sharding(mode="full")


class FullSharding:
    """A model whose parameters are sharded, and the gradients of the step under way."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        calls: Calls,
        whole: frozenset[str],
        fused: bool,
        fill: Callable[[Sequence[str]], None] = lambda names: None,
        settings: Sharding = _DEFAULT,
        mirrored: int | None = None,
    ) -> None:
        """Shard `model` in place. All ranks of the `group` call it, with a model of the same bits.

        `whole` are parameters that stay whole on every worker; `fused`: whether one kernel updates an element, which on a CPU rounds the end of a
        tensor otherwise; `fill` gives parameters memory that have none, unit by unit; `settings` say which modules are units, and when they are gathered.
        This worker keeps the rows of rank `mirrored` too.
        """
        self.model, self.group = model, group
        self.names = [name for name, _ in model.named_parameters()]
        units = units_of(model, calls, settings.units)
        self.whole = whole | uncut(model, units, group, fused)
        """The parameters that every worker has whole: FSDP cannot cut them, or only to other bits."""
        self.units = [_name_of(model, unit) for unit in units]
        self.settings = settings
        self.host = HostMemory(group.device) if settings.offload else None
        """Where this worker keeps its rows, if not on the device."""
        self.told = _left_out(model, units, settings.units)
        """Warnings of modules that the settings name, and that are no units."""
        asking = {name: p.requires_grad for name, p in model.named_parameters()}
        self._attributes = {name: noted_on(p) for name, p in model.named_parameters()}
        """What the job has noted on its parameters, by which an optimizer may treat them otherwise. FSDP makes others."""
        self._places = places_of(model)
        self.mirrored = mirrored
        self.unit_bytes = unit_bytes(model, units, self.whole)
        cut_mirrors: dict[str, Tensor] = {}

        def fill_and_mirror(names: Sequence[str]) -> None:
            fill(names)
            if mirrored is not None:
                cut_mirrors.update(self._rows_of_rank(mirrored, names, cut_mirrors))

        self._root, modules = shard_modules(model, units, self.whole, group, fill_and_mirror, settings)
        self._modules: list[Any] = modules
        parameters: dict[str, Any] = dict(model.named_parameters())
        self.shards: dict[str, Shard] = {}
        """This worker's rows of each parameter that is sharded, by name, and those that it mirrors."""
        for name in self.names:
            if name not in self.whole:
                shape, mirror = parameters[name].shape, None
                if mirrored is not None:
                    mirror = Shard(cut_mirrors[name], shape, mirrored, group.size)
                local = parameters[name].to_local().detach()
                self.shards[name] = Shard(local, shape, group.rank, group.size, mirror)
        self.local: dict[str, nn.Parameter] = {
            name: parameters[name]
            if name in self.whole
            else nn.Parameter(self.shards[name].local, requires_grad=asking[name])
            for name in self.names
        }
        """What this worker updates of each parameter, in the memory that FSDP gathers from."""
        self.mirrors: dict[str, nn.Parameter] = {
            name: nn.Parameter(shard.mirror.local, requires_grad=asking[name])
            for name, shard in self.shards.items()
            if shard.mirror is not None
        }
        """The rows that this worker mirrors."""
        self._index: dict[str, int] = {}
        """The places of the parameters that learn in the phase under way."""
        self._scatters = self._set_up(modules, asking)
        self._whole_sum: TreeSum | None = None
        self._whole_learning: list[str] = []
        self.pass_: range = range(0)
        self.leaves = 0
        self.observe: Observe | None = None
        self.empty = False
        """Whether this worker's micro-batch has no sample: its gradient is zero everywhere."""
        self.last = False
        self.order = 0
        """A number for the units that were gathered since `begin_step`, in their order: the same on every worker, or one has computed with other weights."""
        self.begun: set[int] = set()
        """The numbers of the modules whose gathering has begun, and has not been waited for."""
        self.copied: list[Tensor] = []
        """What was gathered on a CPU, and that FSDP has copied to the parameters since: it is freed at the next chance."""
        self._forward: list[int] | None = None
        """In a pass, the numbers of the modules that its forward has gathered."""
        self._orders: dict[tuple[str, ...], tuple[int, ...]] = {}
        """The order in which the forward of a phase's last pass gathered its modules, by the names of what learns in it."""
        with torch.no_grad():  # so that FSDP knows its root before anything else calls a unit
            self._root(lambda: None)
        self.reshard()
        for name in self.shards:
            if asking[
                name
            ]:  # what FSDP sets before the last pass is no sum, and would take the memory of one
                parameters[name].register_post_accumulate_grad_hook(self._drop)
        self._gathered = self._as_gathered()
        for of_step in (parameters, self.local, self.mirrors, self._gathered):
            for name, parameter in of_step.items():
                vars(parameter).update(self._attributes[name])
        """The parameters as a micro-batch sees them. FSDP makes each once, and gives it memory when it is gathered."""
        self._writes: list[int] = []

    def _rows_of_rank(self, rank: int, names: Sequence[str], done: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of a rank of those parameters that are to be cut, and are whole now, in memory of their own."""
        parameters = dict(self.model.named_parameters())
        return {
            name: Shard(parameters[name], parameters[name].shape, rank, self.group.size)
            .rows_of(parameters[name].detach())
            .clone()
            for name in names
            if name not in self.whole and name not in done
        }

    def release(self) -> None:
        """Take FSDP off the model, whatever it is doing. The rows stay; the parameters in the model have no memory until something else fills them."""
        blank = {
            name: nn.Parameter(
                torch.empty(shard.shape, dtype=shard.local.dtype, device="meta"),
                requires_grad=self.local[name].requires_grad,
            )
            for name, shard in self.shards.items()
        }
        for name, parameter in blank.items():
            vars(parameter).update(self._attributes[name])
        for module in self._modules:
            module.release()
        undo(self.model, self._places, blank)
        self._modules, self._scatters, self._gathered = [], [], {}
        self._root = Root(nn.Module())
        self.copied.clear()
        self.begun.clear()

    def fill_blank(self, names: Sequence[str]) -> None:
        """Give those of the parameters memory of any content that have none after `release`."""
        parameters = dict(self.model.named_parameters())
        for name in names:
            if (blank := parameters[name]).is_meta:
                memory = torch.empty(blank.shape, dtype=blank.dtype, device=self.group.device)
                filled = nn.Parameter(memory, requires_grad=blank.requires_grad)
                vars(filled).update(vars(blank))
                put(self._places[name], filled)

    def _set_up(self, calls: Sequence[FSDPCalls], asking: Mapping[str, bool]) -> list[Scatter]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        scatters = []
        modules = [sharded.module for sharded in calls]
        for number, module in enumerate(modules):
            sharded: Any = calls[number]
            of_unit = [
                names[id(parameter)] for parameter in in_order_of_fsdp(module, modules, names, self.whole)
            ]
            learning = [name for name in of_unit if asking[name]]
            scatter = Scatter(self, learning)
            sharded.set_custom_all_gather(Gather(self, number))
            sharded.set_custom_reduce_scatter(scatter)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            if learning:  # in some phase
                scatters.append(scatter)
        return scatters

    def _drop(self, parameter: Tensor) -> None:
        if not self.last:
            parameter.grad = None

    def _as_gathered(self) -> dict[str, nn.Parameter]:
        gathered: dict[str, nn.Parameter] = {}
        for module in self._modules:
            module.unshard()
            gathered |= {
                name: parameter
                for name, parameter in self.model.named_parameters()
                if name in self.shards and not hasattr(parameter, "to_local")
            }
            module.reshard()
        return gathered

    # --- a step ---------------------------------------------------------------------------------------------------

    def begin_step(self, leaves: int, names: Sequence[str]) -> None:
        """Begin a step, or a phase of it, of so many micro-batches, in which the parameters `names` get a gradient."""
        self.leaves, self.order = leaves, 0
        self._whole_sum = TreeSum(leaves)
        self._index = {name: i for i, name in enumerate(names)}
        self._whole_learning = [name for name in names if name in self.whole]
        for scatter in self._scatters:
            scatter.begin(leaves, self._index)

    def as_computed(self, names: Sequence[str]) -> list[nn.Parameter]:
        """Those of the parameters as a micro-batch sees them: what a backward leaves gradients in."""
        return [self._gathered.get(name, self.local[name]) for name in names]

    def begin_pass(self, together: range, *, empty: bool, last: bool, observe: Observe | None) -> None:
        """Begin a pass over the micro-batches `together`, of which this worker computes one; `last` is whether it is the step's last pass.

        `observe` sees the gradient of this worker's micro-batch before it is cut.
        """
        self.pass_, self.empty, self.last, self.observe = together, empty, last, observe
        for scatter in self._scatters:
            scatter.calls = 0
        self._forward = []
        self._prefetch(self._orders.get(tuple(self._index), ()))
        self._writes = [parameter._version for parameter in self._gathered.values()]

    def computed(self, compute: Callable[[], T]) -> T:
        """What `compute` returns, with the parameters at hand that it uses. Backward begins with tensors in it."""
        with NoShards():
            result: T = self._root(compute)
        if self._forward is not None:
            self._orders[tuple(self._index)], self._forward = tuple(self._forward), None
            for (
                module
            ) in self._modules:  # a statistic of the pass may need other modules, and has no backward
                module.set_modules_to_forward_prefetch([])
        return result

    def _prefetch(self, order: Sequence[int]) -> None:
        """Have each module gather those that follow it in `order` ahead, and in a backward those before it; without an order none does."""
        ahead, modules = self.settings.prefetch, self._modules
        following = {number: order[i + 1 : i + 1 + ahead] for i, number in enumerate(order)}
        before = {number: order[max(0, i - ahead) : i][::-1] for i, number in enumerate(order)}
        for number, module in enumerate(modules):
            module.set_modules_to_forward_prefetch([modules[n] for n in following.get(number, ())])
            # FSDP gathers one ahead by itself where none is named: a module names itself, which is there.
            named = [modules[n] for n in before.get(number, ())] or [module]
            module.set_modules_to_backward_prefetch(named)

    def end_pass(self, where: str) -> None:
        """Add what every worker has computed in the pass. After the last one the sums are the gradients of `local`.

        JobError where a unit gave no gradient, or more than one, or where the job wrote to a parameter.
        """
        for (name, parameter), writes in zip(self._gathered.items(), self._writes, strict=True):
            if parameter._version != writes:
                raise written_parameter(name, where)
            if parameter.grad is not None:
                raise problems.GRADIENT_WENT_ON(name=name, where=where)
        self._prefetch(())  # what computes between passes may not need what a pass does
        if self.begun:
            self.reshard()
        for scatter in self._scatters:
            if scatter.calls != bool(scatter.learning):
                raise not_once(scatter.learning, scatter.calls, where)
        self._add_whole(where)
        for name, parameter in self.model.named_parameters():
            if name in self.whole:
                continue
            if self.last and parameter.grad is not None:
                self.local[name].grad = parameter.grad.to_local()  # type: ignore[attr-defined]
            parameter.grad = None

    def _add_whole(self, where: str) -> None:
        """Bring the gradients together that every worker needs whole: those of all micro-batches of the pass, by parameter type."""
        names = self._whole_learning
        if not names:
            return
        assert self._whole_sum is not None
        gradients = [self.local[name].grad for name in names]
        missing = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
        if missing:
            raise missing_gradient(missing, where)
        own = [gradient for gradient in gradients if gradient is not None]
        if self.empty:
            torch._foreach_zero_(own)
        if self.observe is not None:
            self.observe(own, [self._index[name] for name in names])
        by_rank = self._of_every_rank(own)
        for m, of_rank in zip(self.pass_, by_rank, strict=False):
            self._whole_sum.add(range(m, m + 1), of_rank)
        total = self._whole_sum.sums[0][1] if self.last else [None] * len(names)
        for name, gradient in zip(names, total, strict=True):
            self.local[name].grad = gradient

    def _of_every_rank(self, gradients: list[Tensor]) -> list[list[Tensor]]:
        """The gradients of every rank, by rank, in memory of their own."""
        row = torch.cat([_bytes(gradient) for gradient in gradients])
        every = row.new_empty((self.group.size, len(row)))
        self.group.wait(all_gather(every.view(-1), row, self.group.channel))
        sizes = [gradient.nbytes for gradient in gradients]
        return [
            [
                _laid_out(part, gradient)
                for part, gradient in zip(torch.split(received, sizes), gradients, strict=True)
            ]
            for received in every
        ]

    def forget_gradients(self) -> None:
        """Set every gradient to None."""
        for parameter in chain(self.local.values(), self.model.parameters()):
            parameter.grad = None

    def at_hand(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Those of the parameters that have their values now, by name: inside of `computed` all that are in no unit."""
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name] for name in names if not hasattr(parameters[name], "to_local")}

    # --- parameters -----------------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Let go of what is gathered: outside of a micro-batch every module has its shards."""
        self.free_copied()
        for number in sorted(
            self.begun
        ):  # gathered ahead for nothing: FSDP would take it for the next one, after an update
            self._modules[number].unshard()
        for module in self._modules:
            module.reshard()

    def free_copied(self) -> None:
        """Free what was gathered and copied: a thread of gloo keeps it until it gets a turn to run."""
        for tensor in self.copied:
            tensor.untyped_storage().resize_(0)
        self.copied.clear()

    @contextmanager
    def gathered(self, where: str) -> Iterator[None]:
        """Have every parameter whole in the model, on every worker; what is written to them stays. All ranks call it. It needs the memory of all parameters.

        JobError, with the place in the run, where the block leaves another parameter in the place of one, or gives one another type, shape or layout.
        """
        for module in self._modules:
            module.unshard()
        try:
            whole = {
                name: parameter for name, parameter in self.model.named_parameters() if name in self.shards
            }
            names = {id(parameter): name for name, parameter in whole.items()}
            memory = {name: parameter.data for name, parameter in whole.items()}
            with whole_in_state_dicts(self.model), WholeGradients(names, self.whole_gradient):
                yield
            now = dict(self.model.named_parameters())
            for name, parameter in whole.items():
                if now.get(name) is not parameter or _form(parameter) != _form(memory[name]):
                    raise problems.PARAMETER_REPLACED(name=name, where=where)
                self.shards[name].fill(parameter.detach())
                restore_memory(parameter, memory[name])
        finally:
            self.reshard()

    def whole_gradient(self, name: str) -> Tensor | None:
        """The gradient of a sharded parameter, whole, on every worker; None where it has none. All ranks call it."""
        gradient, shape = self.local[name].grad, self.shards[name].shape
        if gradient is None:
            return None
        if self.host is not None:
            gradient = self.host.on_device(gradient)
        row = gradient.new_zeros(len(element_ranges(shape, self.group.size)[0]))
        row[: gradient.numel()] = gradient.reshape(-1)
        every = row.new_empty(self.group.size * len(row))
        self.group.wait(all_gather(every, row, self.group.channel))
        return every[: shape.numel()].view(shape)  # only the last rows are filled up

    def state(self) -> dict[str, Any]:
        """The model's `state_dict`, with a `Shard` for each tensor that is sharded."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {
            name: self.shards[names[id(value)]]
            if names.get(id(value)) in self.shards
            else value.detach()
            if isinstance(value, Tensor)
            else value
            for name, value in self.model.state_dict(keep_vars=True).items()
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load a whole model's `state_dict`, stored or not, of which this worker takes its rows. RuntimeError or ValueError where it is another model's."""
        current = self.state()
        if strange := sorted(saved.keys() ^ current.keys()):
            raise RuntimeError(f"{strange[0]!r} is in one of the two models alone")
        rest = {}
        with torch.no_grad():
            for name, value in current.items():
                if isinstance(value, Shard) and isinstance(saved[name], Elsewhere):
                    continue  # every worker has its rows
                if isinstance(value, Shard):
                    value.fill(saved[name])
                else:
                    rest[name] = in_memory(saved[name])
        self.model.load_state_dict(rest, strict=False)


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in the order of its memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return row_of(tensor.permute(order)).view(torch.uint8)


def _laid_out(part: Tensor, like: Tensor) -> Tensor:
    """What `_bytes` gave, as a tensor that lies in memory as `like` does."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    in_memory = part.clone().view(like.dtype).view([like.shape[dimension] for dimension in order])
    return in_memory.permute([order.index(dimension) for dimension in range(len(order))])


def _left_out(model: nn.Module, units: Sequence[nn.Module], patterns: Sequence[str] | None) -> list[str]:
    if patterns is None:
        return []
    chosen = set(map(id, units))
    left = [_name_of(model, member) for member in members_of(model, patterns) if id(member) not in chosen]
    if not left:
        return []
    more = f" and {len(left) - 1} more are" if len(left) > 1 else " is"
    return [
        f"sharding.units: {left[0]!r}{more} no unit: a loss computes it several times in a micro-batch, or not at all, or it has no parameters; what is in "
        "no unit is gathered for the whole micro-batch"
    ]


def restore_memory(parameter: nn.Parameter, memory: Tensor) -> None:
    """Have a parameter lie in the memory that FSDP gathers it into, where `parameter.data = …` has given it other memory."""
    if parameter.data_ptr() != memory.data_ptr():
        parameter.data = memory


def _form(tensor: Tensor) -> tuple[object, ...]:
    """The type, place, shape and layout of a tensor: kernels go by all of them."""
    strides = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.dtype, tensor.device, tensor.shape, strides


def _name_of(model: nn.Module, unit: nn.Module) -> str:
    return str(next(name for name, module in model.named_modules() if module is unit))


_OF_SHARDS = ("storage of size 0", "DTensor")
"""What torch says where a parameter is used while it is not gathered."""


@contextmanager
def advised() -> Iterator[None]:
    """Add the remedy where the job fails because it uses parameters that are not gathered."""
    try:
        yield
    except JobError as error:
        text = error.facts.get("got", "")  # of an error that the job's code raised, what torch said
        if error.code == problems.NOT_GATHERED.code or any(word in text for word in _OF_SHARDS):
            raise problems.ONLY_GATHERED(got=error) from error
        raise


def diverged(where: str) -> JobError:
    """The error for workers that did not gather the same units in the same order."""
    return problems.DIVERGED(where=where)
