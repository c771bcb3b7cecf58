"""Training mode and evaluation mode of a model's modules, and what an update changes of the modules' plain attributes.

Invariants: in training mode each module has the mode that `job.model()` returned it in, and in evaluation mode all are in `eval()`; a module's
own `train()` and `eval()` are heard in both. Whatever changes a mode meanwhile, such as a loss, the next micro-batch begins with those of training.
What `after_step` changes of a module, its mode among it, holds from then on, and checkpoints keep it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

Settings = Mapping[str, Mapping[str, Any]]
"""Plain attributes of modules, by the name of the module and that of the attribute."""

_PLAIN = (bool, int, float, str, type(None))
_ABSENT = object()
_ANY_BATCH_NORM = nn.modules.batchnorm._NormBase
_ANY_DROPOUT = nn.modules.dropout._DropoutNd


class Modes:
    """The mode of each module of a model, to be restored however it is changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())
        self.note()

    def note(self) -> None:
        """Accept the modes as they are now."""
        self._modes = [module.training for module in self._modules]

    @property
    def trains(self) -> bool:
        """Whether any module was in training mode."""
        return any(self._modes)

    def changed(self) -> str:
        """The name of the first module whose mode differs, or nothing."""
        was = self._by_id()
        named = self._model.named_modules()
        differing = (
            name or "the model"
            for name, module in named
            if was.get(id(module), module.training) != module.training
        )
        return next(differing, "")

    def changed_where_it_learns(self) -> str:
        """The same, but for modules whose parameters are all frozen, as those of a teacher."""
        was = self._by_id()
        resting: tuple[str, ...] = ()
        for name, module in self._model.named_modules():
            if was.get(id(module), module.training) == module.training or name.startswith(resting):
                continue
            parameters = list(module.parameters())
            if not parameters or any(parameter.requires_grad for parameter in parameters):
                return name or "the model"
            resting += (f"{name}.",)
        return ""

    def restore(self) -> None:
        """Restore the modes where one differs."""
        if [
            module.training for module in self._modules
        ] != self._modes:  # for each micro-batch, of a thousand modules
            self.restore_by_train()

    def restore_by_train(self) -> None:
        """Restore the modes by `train()`, as a training loop would: a module may keep something until it is called."""
        self._model.train(self._modes[0])
        _set(list(zip(self._modules, self._modes, strict=True)))

    def _by_id(self) -> dict[int, bool]:
        return {id(module): mode for module, mode in zip(self._modules, self._modes, strict=True)}


def _set(flags: Sequence[tuple[nn.Module, bool]]) -> None:
    for module, mode in flags:  # parents first: train() sets those below it as well
        if module.training is not mode:
            module.train(mode)
    for module, mode in flags:  # where a train() of its own does otherwise
        module.training = mode


def enter_training(model: nn.Module) -> None:
    """Put a model that `job.model()` has just returned into its training mode.

    A module that the job returned in evaluation mode, such as a frozen teacher, stays in it; so does one that a `train()` of the model's own
    puts there. A model that is in evaluation mode itself, as `from_pretrained` returns it, is put into training mode as a whole.
    """
    returned = [(module, module.training) for module in model.modules()]
    model.train()
    if returned[0][1]:
        _set([(module, mode and module.training) for module, mode in returned])


def learning_in_evaluation_mode(model: nn.Module) -> list[str]:
    """A warning where a part that learns was returned in evaluation mode, and has dropout or batch norm, which a loop's `train()` would turn on."""
    names = [name for name, module in model.named_modules() if _rests_as_a_whole(module)]
    names = [name for name in names if not any(has_own_train(ancestor) for ancestor in _above(model, name))]
    if model.training is False or not names:
        return []
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"job.model: {names[0]!r}{others} learns, and job.model returned it in evaluation mode, so it trains without dropout and with the running "
        "statistics of its batch norms; call train() on it in job.model if it should train as usual"
    ]


def _rests_as_a_whole(module: nn.Module) -> bool:
    """Whether a module learns in evaluation mode and holds others that compute otherwise in training mode."""
    if module.training or not any(parameter.requires_grad for parameter in module.parameters()):
        return False
    return any(
        (isinstance(submodule, _ANY_DROPOUT) and submodule.p > 0)
        or (isinstance(submodule, _ANY_BATCH_NORM) and submodule.track_running_stats)
        for submodule in module.modules()
        if submodule is not module and not submodule.training
    )


def _above(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules that hold the module `name`, and itself, from the model down."""
    yield model
    parts = name.split(".") if name else []
    for i in range(1, len(parts) + 1):
        yield model.get_submodule(".".join(parts[:i]))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, without gradients; restore every module's own mode afterwards."""
    modes, listens = Modes(model), any(map(has_own_train, model.modules()))
    if listens or modes.trains:  # setting the modes of a thousand modules takes milliseconds
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if listens:
            modes.restore_by_train()
        else:
            modes.restore()


def has_own_train(module: nn.Module) -> bool:
    """Whether `train()` or `eval()` may do more to a module than set its mode."""
    train, evaluate = (getattr(method, "__func__", None) for method in (module.train, module.eval))
    return train is not nn.Module.train or evaluate is not nn.Module.eval


class ModuleSettings:
    """What updates have changed of the modules' plain attributes since `job.model()` made them.

    torch's `freeze_bn_stats` and `LSQ` steps, a temperature, a mode: a model's `state_dict` has none of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self.changed: dict[str, dict[str, Any]] = {}
        self._made_with: dict[tuple[str, str], Any] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Note what the block changes. It compares objects by identity: this runs once a step, for a thousand modules."""
        attributes = [vars(module) for module in self._modules.values()]
        copies = [namespace.copy() for namespace in attributes]
        yield
        for name, now, was in zip(self._modules, attributes, copies, strict=True):
            if len(now) == len(was) and all(map(is_, now.values(), was.values())):
                continue
            for key, value in now.items():
                old = was.get(key, _ABSENT)
                if isinstance(value, _PLAIN) and not (type(old) is type(value) and old == value):
                    self._made_with.setdefault((name, key), old)
                    self.changed.setdefault(name, {})[key] = value

    def load(self, changed: Settings) -> None:
        """Have the modules as `job.model()` made them, but for what `changed` says. KeyError where there is no such module."""
        modules = self._modules
        for (name, key), value in self._made_with.items():
            if value is _ABSENT:
                modules[name].__dict__.pop(key, None)
            else:
                modules[name].__dict__[key] = value
        self._made_with, self.changed = {}, {}
        for name, attributes in changed.items():
            for key, value in attributes.items():
                self._made_with[name, key] = modules[name].__dict__.get(key, _ABSENT)
                modules[name].__dict__[key] = value
            self.changed[name] = dict(attributes)
