"""The modules of a model under torch's FSDP2: how its sharding is put on them, and taken off again so that another group can shard them anew."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.communication.group import Group
from lockstep.spec.sharding import Sharding
from lockstep.training import problems

if TYPE_CHECKING:
    from lockstep.training.step.fsdp_calls import FSDPCalls

Places = dict[str, list[tuple[nn.Module, str]]]
"""By the name of a parameter the modules that hold it, each with its name there: several of a tied one."""


class Originals(NamedTuple):
    """The parameters of a model from before it was cut."""

    parameters: dict[str, weakref.ref[nn.Parameter]]
    """By name."""
    known_by_id: Mapping[str, str]
    """By name those of which something knows what `id` says, with what that is: an attribute of the model or the job."""

    def of(self, names: Iterable[str]) -> Originals:
        """Those with these names."""
        return Originals({name: self.parameters[name] for name in names}, self.known_by_id)


class Root(nn.Module):
    """The module at which FSDP begins and ends a micro-batch: whatever the job's loss calls happens inside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


@contextmanager
def whole_in_state_dicts(model: nn.Module) -> Iterator[None]:
    """In the block: have `state_dict` and `load_state_dict` of the model and its modules leave gathered parameters so. FSDP's hooks let go of them."""
    hooks = [
        (hooks, number, hook)
        for module in model.modules()
        for hooks in _hooks_of_state(module)
        for number, hook in list(hooks.items())
        if _is_of_fsdp(hook)
    ]
    for of_module, number, _ in hooks:
        del of_module[number]
    try:
        yield
    finally:
        for of_module, number, hook in hooks:
            of_module[number] = hook


_OF_FSDP = ("torch.distributed.fsdp", "lockstep.training.step.fsdp_calls")
"""Where the hooks are defined that a sharded module has."""


def _is_of_fsdp(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith(_OF_FSDP)


def shard_modules(
    model: nn.Module,
    units: Sequence[nn.Module],
    whole: frozenset[str],
    group: Group,
    fill: Callable[[Sequence[str]], None],
    settings: Sharding,
) -> tuple[Root, list[FSDPCalls]]:
    """The root of the sharded model, and FSDP's calls on its modules that have shards, the root last."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    from lockstep.training.step.fsdp_calls import FSDPCalls

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_units = [[names[id(parameter)] for parameter in unit.parameters()] for unit in units]
    fill(sorted(whole))
    ignored = {parameter for name, parameter in model.named_parameters() if name in whole}
    mesh = group.mesh()
    root = Root(model)
    modules = [*units, root]
    calls = []
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if settings.offload else OffloadPolicy()
    for module, of_module in zip(modules, [*of_units, list(names.values())], strict=True):
        fill(of_module)
        # FSDP never lets go of what the root has between forward and backward, unless it is told to.
        reshards = settings.reshard_after_forward and module is not root
        fully_shard(
            module,
            mesh=mesh,
            ignored_params=ignored,
            reshard_after_forward=reshards,
            offload_policy=policy,
        )
        calls.append(FSDPCalls(module))
    begun: list[FSDPCalls] = []
    for unit in calls[:-1]:  # the root has its parameters until the backward ends
        unit.follow(begun)
    for each in root.modules():
        # By this mark torch's compiler would take a buffer for one that moves, and trace another program than of a whole model.
        vars(each).pop("_is_fsdp_managed_module", None)
    return root, calls


def in_order_of_fsdp(
    module: nn.Module, modules: Sequence[nn.Module], names: Mapping[int, str], whole: frozenset[str]
) -> list[nn.Parameter]:
    """A unit's parameters in the order in which FSDP lays them out: those of a module's children before its own."""
    other_modules = {id(each) for each in modules if each is not module}
    visited, result = set[int](), list[nn.Parameter]()

    def visit(at: nn.Module) -> None:
        visited.add(id(at))
        for child in at.children():
            if id(child) not in visited and id(child) not in other_modules:
                visit(child)
        for parameter in at.parameters(recurse=False):
            if id(parameter) not in visited and names[id(parameter)] not in whole:
                visited.add(id(parameter))
                result.append(parameter)

    visit(module)
    return result


def places_of(model: nn.Module) -> Places:
    """Where each parameter of a model is. Call it while tied parameters are one object."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: Places = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, key))
    return places


def originals_of(model: nn.Module, job: object) -> Originals:
    """The parameters of a model that is about to be cut. `job` is where it comes from."""
    parameters = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    return Originals(parameters, _known_by_id(model, job))


_MOST_OBJECTS = 1_000_000
"""So many are looked at."""


def _known_by_id(model: nn.Module, job: object) -> dict[str, str]:
    """By name the parameters of which the job, its module or the model has what `id` says, and where.

    In attributes, in containers and in what functions have bound, at any depth.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known: dict[str, str] = {}
    visited: set[int] = set()
    module = vars(sys.modules.get(type(job).__module__, job))
    containers = {name: each for name, each in module.items() if isinstance(each, dict | list | set | tuple)}
    named = [*vars(job).items(), *containers.items(), ("model", model)]
    waiting = [(value, name) for name, value in named if not name.startswith("__")]
    while waiting and len(visited) < _MOST_OBJECTS:
        item, where = waiting.pop()
        if type(item) is int and item in names:
            known[names[item]] = where
        if id(item) in visited or isinstance(item, _NOT_LOOKED_INTO):
            continue
        visited.add(id(item))
        inside = item.__closure__ or () if isinstance(item, FunctionType) else gc.get_referents(item)
        waiting += [(each, where) for each in inside]
    return known


_NOT_LOOKED_INTO = (int, str, type, ModuleType, FrameType)


def check_gone(originals: Originals) -> None:
    """JobError where something still holds a parameter that is cut by now: it would have the memory that sharding is to save, and never learn.

    The same where something knows one by what `id` says: there are others in their places. A graph may hold one, as where a module keeps the newest
    attention weights in an attribute: its memory is freed, and a backward through that graph is the error.
    """
    for name in originals.parameters:
        if (where := originals.known_by_id.get(name)) is not None:
            raise problems.KNOWN_BY_ID(name=name, got=where)
    gc.collect()
    known: dict[str, Any] = {name: original() for name, original in originals.parameters.items()}
    alive = {name: original for name, original in known.items() if original is not None}
    del known  # no graph, but it holds them
    if not alive:
        return
    holders = [each for each in gc.get_referrers(*alive.values()) if each is not alive]  # a graph is none
    held_ids = {id(each) for holder in holders for each in gc.get_referents(holder)}
    memory: dict[str, Any] = {
        name: StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
        for name, each in alive.items()
    }
    for each in alive.values():
        each.data = each.new_empty(0)
    for name, each in alive.items():
        if id(each) in held_ids or not memory[name].expired():  # by a view, in the latter case
            raise problems.HELD_OUTSIDE(name=name)
        each.register_hook(partial(_refuse_gradient, name))


def _refuse_gradient(name: str, _gradient: torch.Tensor) -> NoReturn:
    raise problems.HELD_OUTSIDE(name=name)


def can_be_undone() -> bool:
    """Whether this torch has the parts of FSDP2 that `undo` needs, of which one is private."""
    try:
        from torch.distributed import _composable_state as composable
        from torch.distributed.fsdp import FSDPModule, fully_shard
    except ImportError:
        return False
    return (
        hasattr(composable, "_module_state_mapping")
        and hasattr(fully_shard, "state")
        and hasattr(FSDPModule, "reshard")
    )


def undo(model: nn.Module, places: Places, blank: Mapping[str, nn.Parameter]) -> None:
    """Take FSDP off a model, in whatever state it is, and put the parameters of `blank` in the places of those that it has cut.

    torch has no call for this. What FSDP leaves on a module are its hooks, a few attributes and an entry in a table of torch's; its class is gone.
    """
    from torch.distributed import _composable_state as composable

    for module in model.modules():
        composable._module_state_mapping.pop(module, None)
        for hooks in _hooks_of(module):
            for number in [number for number, hook in hooks.items() if _is_of_fsdp(hook)]:
                del hooks[number]
        attributes = vars(module)
        for key in [key for key in attributes if key.startswith(_ATTRIBUTES)]:
            del attributes[key]
    for name, parameter in blank.items():
        put(places[name], parameter)


def put(places: Sequence[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    """Have a parameter in its places."""
    for module, key in places:
        module._parameters[key] = parameter


_ATTRIBUTES = (
    "__composable_api_state_key",
    "__deepcopy__",
    "_is_fsdp_managed_module",
    "_fsdp_use_orig_params",
)


def _hooks_of(module: nn.Module) -> list[Any]:
    return [module._forward_pre_hooks, module._forward_hooks, *_hooks_of_state(module)]


def _hooks_of_state(module: nn.Module) -> list[Any]:
    return [
        module._state_dict_pre_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    ]
