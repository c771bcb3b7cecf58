"""A model that is made without memory for its parameters, which get their initial bits unit by unit, when they are asked for.

`job.model()` runs on torch's fake tensors. Every operator on them is recorded; one that draws also draws into memory that is let go of at once, so that the generators
go on as ever, and the state before it is kept. A parameter is made by the recorded operators on which it depends, each draw from the state that it had:
the same kernels with the same arguments, and so the same bits. What cannot be recorded is refused (`NotDeferredError`), and the caller makes the model as usual.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.checkpoint.stored_tensor import in_memory
from lockstep.training.step.parameters import noted_on

_DRAWS = frozenset(
    f"aten::{name}"
    for name in ("uniform_", "normal_", "random_", "exponential_", "rand", "randn", "randint", "randperm")
)
"""Operators whose draws depend on their sizes and numbers alone."""

_STORAGES = "storages of fake tensors"
"""What a deep copy has copied of them, in its memo: two copies of one memory would be one memory again."""


class NotDeferredError(Exception):
    """Making the model does something that cannot be recorded; the text says what."""


class _Input(NamedTuple):
    """Stands for a fake tensor among the arguments of a call."""

    tensor: int


class _Call(NamedTuple):
    """An operator that was called."""

    operator: Any
    arguments: list[Any]
    structure: Any
    inputs: frozenset[int]
    outputs: tuple[int | None, ...]
    read: frozenset[int]
    """The numbers of the storages of its inputs."""
    written: frozenset[int]
    generator: torch.Generator | None
    state: Tensor | None
    """Of the generator, before the call."""


class _Recorder(TorchDispatchMode):
    """Records the calls of operators on fake tensors, which a `FakeTensorMode` below it computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.numbers: Any = WeakTensorKeyDictionary()
        """The number of each fake tensor that is there."""
        self.why_not = ""
        """Set also where the job's own code catches the error."""
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._storage_of: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        arguments, structure = tree_flatten((args, kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload):
            raise self._refused(f"{func} is no operator")
        if func._schema.returns and not any("Tensor" in str(value.type) for value in func._schema.returns):
            return self._value(func, arguments, structure)
        written_tensors = _written(func, args, kwargs or {})
        if any(isinstance(t, Tensor) and not isinstance(t, FakeTensor) for t in written_tensors):
            raise self._refused(f"{func} writes to a tensor that was there before")
        generator, state = None, None
        if torch.Tag.nondeterministic_seeded in func.tags:
            if func._schema.name not in _DRAWS:
                raise self._refused(f"{func} draws in a way of its own")
            given = [argument for argument in arguments if isinstance(argument, torch.Generator)]
            generator = given[0] if given else torch.default_generator
            with _disable_current_modes():
                state = generator.get_state()
        fakes = [argument for argument in arguments if isinstance(argument, FakeTensor)]
        inputs = [self.number(fake) for fake in fakes]
        read = frozenset(self._storage_of[number] for number in inputs)
        written = frozenset(self._storage_of[self.number(fake)] for fake in written_tensors)
        result = func(*args, **(kwargs or {}))
        if state is not None:
            self._draw(func, arguments, structure)
        outputs = tree_flatten(result)[0]
        if any(isinstance(t, Tensor) and t.device.type != "cpu" for t in (*fakes, *outputs)):
            raise self._refused("it makes tensors on a device")
        stand_ins = [
            _Input(self.number(argument)) if isinstance(argument, FakeTensor) else argument
            for argument in arguments
        ]
        numbers = tuple(self._noted(output) if isinstance(output, FakeTensor) else None for output in outputs)
        self.calls.append(
            _Call(func, stand_ins, structure, frozenset(inputs), numbers, read, written, generator, state)
        )
        return result

    def number(self, fake: Tensor) -> int:
        """The number of a fake tensor. NotDeferredError where it has got other memory since, as by `tensor.data = …`."""
        if fake not in self.numbers:
            raise self._refused("it takes a tensor from elsewhere")
        number: int = self.numbers[fake]
        if self._storage(fake) != self._storage_of[number]:
            raise self._refused("it gives a tensor other memory (.data = …)")
        return number

    def storage_of(self, number: int) -> int:
        return self._storage_of[number]

    def _noted(self, fake: Tensor) -> int:
        """The number of an output, which may be one of the inputs."""
        number: int = self.numbers.setdefault(fake, len(self._storage_of))
        self._storage_of[number] = self._storage(fake)
        return number

    def _storage(self, fake: Tensor) -> int:
        # The weak reference keeps another storage from getting the same address.
        reference = StorageWeakRef(fake.untyped_storage())  # type: ignore[no-untyped-call]
        return self._storages.setdefault(reference.cdata, (reference, len(self._storages)))[1]

    def _value(self, func: Any, arguments: list[Any], structure: Any) -> Any:
        """A number that the job's code goes by, of the bits that its tensors will have."""
        from torch._subclasses.fake_tensor import FakeTensor

        numbers = {i: self.number(fake) for i, fake in enumerate(arguments) if isinstance(fake, FakeTensor)}
        with _disable_current_modes():
            values = self.computed(set(numbers.values()))
            given = [values[numbers[i]] if i in numbers else argument for i, argument in enumerate(arguments)]
            args, kwargs = tree_unflatten(given, structure)
            return func(*args, **kwargs)

    def _draw(self, func: Any, arguments: list[Any], structure: Any) -> None:
        """Draw what the call draws, into memory that is let go of."""
        with _disable_current_modes():
            given = [
                torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype)
                if isinstance(argument, Tensor)
                else argument
                for argument in arguments
            ]
            args, kwargs = tree_unflatten(given, structure)
            func(*args, **kwargs)

    def computed(self, wanted: set[int]) -> dict[int, Tensor]:
        """Fake tensors by their numbers with memory, computed by the calls on which they depend."""
        tensors, storages = set(wanted), {self._storage_of[number] for number in wanted}
        calls: list[_Call] = []
        for call in reversed(self.calls):
            if call.written & storages or not tensors.isdisjoint(call.outputs):
                calls.append(call)
                tensors |= call.inputs
                storages |= call.read
        uses: dict[int, int] = {}
        for call in calls:
            for number in call.inputs:
                uses[number] = uses.get(number, 0) + 1
        values: dict[int, Tensor] = {}
        with torch.no_grad():
            for call in reversed(calls):
                self._call(call, values)
                for number in call.inputs:
                    uses[number] -= 1
                for number in {*call.inputs, *(output for output in call.outputs if output is not None)}:
                    if not uses.get(number) and number not in wanted:
                        values.pop(number, None)
        return values

    def _call(self, call: _Call, values: dict[int, Tensor]) -> None:
        arguments = [
            values[argument.tensor] if isinstance(argument, _Input) else argument
            for argument in call.arguments
        ]
        args, kwargs = tree_unflatten(arguments, call.structure)
        if call.generator is None or call.state is None:
            result = call.operator(*args, **kwargs)
        else:
            now = call.generator.get_state()
            call.generator.set_state(call.state)
            try:
                result = call.operator(*args, **kwargs)
            finally:
                call.generator.set_state(now)
        outputs = zip(call.outputs, tree_flatten(result)[0], strict=True)
        values.update((number, output) for number, output in outputs if number is not None)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """In the block: have `copy.deepcopy` of a tensor be recorded. Torch's own copies what stands behind a fake one, and leaves the heap of the process damaged."""
        usual = Tensor.__deepcopy__

        def deep_copied(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
            from torch._subclasses.fake_tensor import FakeTensor

            if id(tensor) not in memo:
                if isinstance(tensor, FakeTensor):
                    memo[id(tensor)] = self._deep_copied(tensor, memo)
                else:
                    with _disable_current_modes():
                        usual(tensor, memo)  # type: ignore[no-untyped-call]
            copied: Tensor = memo[id(tensor)]
            return copied

        Tensor.__deepcopy__ = deep_copied  # type: ignore[method-assign]
        try:
            yield
        finally:
            Tensor.__deepcopy__ = usual  # type: ignore[method-assign]

    def _deep_copied(self, fake: Tensor, memo: dict[Any, Any]) -> Tensor:
        storages = memo.setdefault(_STORAGES, set[int]())
        storage = self.storage_of(self.number(fake))
        if storage in storages or fake.nbytes != fake.untyped_storage().nbytes():
            raise self._refused("it copies a tensor that is a part of other memory")
        storages.add(storage)
        with torch.no_grad():
            copied = fake.clone()
        if not fake.is_leaf or fake.grad is not None or copied.stride() != fake.stride():
            raise self._refused("it copies a tensor that has a gradient, or lies apart in memory")
        if isinstance(fake, nn.Parameter):  # its own copy takes nothing else along
            return nn.Parameter(copied, fake.requires_grad)
        further = {name: value for name, value in vars(fake).items() if name not in vars(copied)}
        vars(copied).update(copy.deepcopy(further, memo))
        return copied.requires_grad_(fake.requires_grad)

    def _refused(self, why: str) -> NotDeferredError:
        self.why_not = self.why_not or why
        return NotDeferredError(why)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an operator writes to."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += [tensor for tensor in tree_flatten(value)[0] if isinstance(tensor, Tensor)]
    return written


class DeferredModel:
    """A model whose parameters are fake tensors until they are filled. Its buffers are there."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        """`make` makes the model. NotDeferredError where that cannot be recorded; it has then been called all the same."""
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        self._recorder = _Recorder()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), self._recorder, self._recorder.copies():
                self.model = make()
        except Exception as error:
            if self._recorder.why_not or not isinstance(self.__dict__.get("model"), nn.Module):
                raise NotDeferredError(
                    self._recorder.why_not or " ".join(str(error).split())[:200]
                ) from error
            raise
        if self._recorder.why_not:
            raise NotDeferredError(self._recorder.why_not)
        if not isinstance(self.model, nn.Module):
            raise NotDeferredError("job.model returns no module")
        self._fakes: dict[str, Any] = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if isinstance(parameter, FakeTensor)
        }
        self.weights: Mapping[str, Any] | None = None
        """What the parameters begin with instead, by name, stored or not."""
        self._places = self._where()
        self._check()
        self._fill_others()

    def _where(self) -> dict[str, list[tuple[dict[str, Any], str]]]:
        """The modules that have each parameter, and its name there: several of a tied one."""
        names = {id(fake): name for name, fake in self._fakes.items()}
        places: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in self._fakes}
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                if id(parameter) in names:
                    places[names[id(parameter)]].append((module._parameters, key))
        return places

    def _check(self) -> None:
        """NotDeferredError for parameters that are a part of some memory, or that a new object could not stand for."""
        storages = set[int]()
        for name, fake in self._fakes.items():
            storage = self._recorder.storage_of(self._recorder.number(fake))
            if storage in storages or fake.nbytes != fake.untyped_storage().nbytes():
                raise NotDeferredError(f"parameter {name!r} is a part of other memory")
            storages.add(storage)
            if fake._backward_hooks or getattr(fake, "_post_accumulate_grad_hooks", None):
                raise NotDeferredError(f"parameter {name!r} has a hook")

    def _fill_others(self) -> None:
        """Give memory to what is no parameter: buffers, and tensors in attributes of modules. NotDeferredError for one that somebody else has."""
        from torch._subclasses.fake_tensor import FakeTensor

        self._fill_places(
            [
                (owner, key, value)
                for module in self.model.modules()
                for owner in (module._buffers, vars(module))
                for key, value in owner.items()
                if isinstance(value, FakeTensor)
            ]
        )
        gc.collect()
        known = {id(fake) for fake in self._fakes.values()}
        if any(id(fake) not in known for fake in self._recorder.numbers):
            raise NotDeferredError("a tensor that is no parameter or buffer of a module stays in use")

    def _fill_places(self, places: list[tuple[dict[str, Any], str, Any]]) -> None:
        numbers = [self._recorder.number(value) for _, _, value in places]
        filled = self._recorder.computed(set(numbers))
        for (owner, key, value), number in zip(places, numbers, strict=True):
            owner[key] = filled[number].requires_grad_(value.requires_grad)

    def names_in(self, modules: Iterable[nn.Module]) -> list[str]:
        """The names of the parameters in some modules that are not filled."""
        inside = {id(parameter) for module in modules for parameter in module.parameters()}
        return [name for name, fake in self._fakes.items() if id(fake) in inside]

    def begin_with(self, weights: Mapping[str, Any]) -> None:
        """Have the parameters begin with `weights`, a `state_dict` of the model; what has memory by now gets its values at once."""
        self.weights = weights
        here = {name: in_memory(value) for name, value in weights.items() if name not in self._named_fakes()}
        self.model.load_state_dict(here, strict=False)

    def _named_fakes(self) -> set[str]:
        """The names of fake parameters in a `state_dict`: all of a tied one."""
        known = {id(fake) for fake in self._fakes.values()}
        return {name for name, value in self.model.state_dict(keep_vars=True).items() if id(value) in known}

    def fill_blank(self, names: Collection[str]) -> None:
        """Put parameters with memory of any content in the places of fake ones."""
        fakes = {name: self._fakes[name] for name in names if name in self._fakes}
        for name, fake in fakes.items():
            self._put(name, torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype), again=False)

    def fill(self, names: Collection[str], *, again: bool = False) -> None:
        """Put parameters with their initial bits in the places of fake ones; others are left. `again`: they will be emptied."""
        fakes = {name: self._fakes[name] for name in names if name in self._fakes}
        if self.weights is not None:
            for name, fake in fakes.items():
                value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
                self._put(name, value.copy_(in_memory(self.weights[name])), again=again)
            return
        numbers = {name: self._recorder.number(fake) for name, fake in fakes.items()}
        filled = self._recorder.computed(set(numbers.values()))
        for name in fakes:
            self._put(name, filled.pop(numbers[name]), again=again)

    def _put(self, name: str, value: Tensor, *, again: bool) -> None:
        parameter = nn.Parameter(value, requires_grad=self._fakes[name].requires_grad)
        vars(parameter).update(noted_on(self._fakes[name]))
        for owner, key in self._places[name]:
            owner[key] = parameter
        if not again:
            del self._fakes[name], self._places[name]

    def empty(self, names: Collection[str]) -> None:
        """Take the memory of parameters that were filled for a while."""
        for name in names:
            for owner, key in self._places.get(name, ()):
                owner[key] = self._fakes[name]
