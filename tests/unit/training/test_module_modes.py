"""Each module's own mode, as the job returned it; and what updates change of the modules' plain attributes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.job.interface import Job
from lockstep.training.auxiliary_state import beside_weights, load_beside, put_beside, save_beside
from lockstep.training.module_modes import Modes, ModuleSettings, enter_training, learning_in_evaluation_mode


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = net(), nn.Linear(2, 2)


class Keeping(Wrapped):
    """It keeps its backbone in evaluation mode."""

    def train(self, mode: bool = True) -> Keeping:
        super().train(mode)
        self.backbone.eval()
        return self


def test_a_part_in_evaluation_mode_stays_in_it() -> None:
    model = Wrapped()
    model.backbone.eval()
    before = modes(model)
    enter_training(model)
    assert modes(model) == before


def test_a_module_s_own_train_is_heard() -> None:
    model = Keeping()
    enter_training(model)
    assert not any(module.training for module in model.backbone.modules())
    assert model.training and model.head.training


def test_a_model_that_rests_as_a_whole_trains_as_a_whole() -> None:
    """As `from_pretrained` returns it."""
    model = Wrapped().eval()
    enter_training(model)
    assert all(modes(model).values())


def test_modes_come_back_however_they_were_changed() -> None:
    model = Wrapped()
    model.backbone.eval()
    kept, before = Modes(model), modes(model)
    for change in (model.train, model.eval, model.backbone[2].train, model.head.eval):
        change()
        kept.restore()
        assert modes(model) == before


def test_a_part_that_learns_in_evaluation_mode_is_told() -> None:
    """A backbone from `from_pretrained` in a module of the job's own: a loop's train() would have turned its dropout on."""
    model = Wrapped()
    model.backbone.eval()
    (told,) = learning_in_evaluation_mode(model)
    assert told.startswith("job.model: 'backbone' learns, and job.model returned it in evaluation mode")


def frozen() -> nn.Module:
    model = Wrapped()
    model.backbone.eval().requires_grad_(False)
    return model


def norm_alone() -> nn.Module:
    model = Wrapped()
    model.backbone[1].eval()
    return model


def by_train() -> nn.Module:
    model = Keeping()
    enter_training(model)
    return model


@pytest.mark.parametrize("make", [Wrapped, frozen, norm_alone, by_train])
def test_nothing_is_told_of_what_rests_on_purpose(make: type[nn.Module]) -> None:
    """A frozen teacher, a norm of its own, a module whose train() says so."""
    assert learning_in_evaluation_mode(make()) == []


def test_a_loss_that_leaves_a_learning_part_in_evaluation_mode_is_named() -> None:
    model = Wrapped()
    model.head.requires_grad_(False)
    kept = Modes(model)
    model.head.eval()
    assert (kept.changed(), kept.changed_where_it_learns()) == ("head", "")
    model.backbone[2].eval()
    assert kept.changed_where_it_learns() == "backbone.2"


def test_settings_are_those_of_the_state_that_is_loaded() -> None:
    """Those that are changed, new ones among them; loading those of the start puts the attributes back as they were made."""
    model = Wrapped()
    settings = ModuleSettings(model)
    model.head.scale = 1.0  # before: no update has made it
    with settings.followed():
        model.backbone[1].eval()
        model.head.scale = 2.0
        model.head.steps = 3
        model.head.note = torch.zeros(1)  # no plain value
    assert settings.changed == {"backbone.1": {"training": False}, "head": {"scale": 2.0, "steps": 3}}
    other = Wrapped()
    other.head.scale = 1.0
    taken = ModuleSettings(other)
    taken.load(settings.changed)
    assert (other.backbone[1].training, other.head.scale, other.head.steps) == (False, 2.0, 3)
    assert taken.changed == settings.changed
    taken.load({})
    assert (other.backbone[1].training, other.head.scale, hasattr(other.head, "steps")) == (True, 1.0, False)
    with pytest.raises(KeyError):
        taken.load({"nowhere": {"training": False}})


def test_settings_are_beside_the_weights(tmp_path: Path) -> None:
    """A model that is made again from a run's weights computes with them."""
    model, job = Wrapped(), Job(None)
    settings = ModuleSettings(model)
    with settings.followed():
        model.head.scale = 2.0
    path = save_beside(tmp_path / "final.safetensors", beside_weights(model, job, settings.changed))
    assert path.is_file()
    other = Wrapped()
    put_beside(other, job, model.state_dict(), load_beside(tmp_path / "final.safetensors"))
    assert other.head.scale == 2.0
