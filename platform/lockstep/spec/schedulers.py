"""The schedulers of a sweep, each over one of Ray Tune's. A new one is a class here and its name in `Scheduler`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from lockstep.spec.section import Section


class SchedulerRule(Section):
    """Which trials end early, by one of Ray Tune's schedulers."""

    tune_class: ClassVar[str]
    """Its name in ray.tune.schedulers."""
    is_timed: ClassVar[bool] = True
    """Whether it goes by the metric at a step."""
    has_population: ClassVar[bool] = False
    """Whether trials take over the state of others, instead of ending."""

    def arguments(self, total_steps: int, first_evaluation: int) -> dict[str, Any]:
        """The arguments of Tune's class, beside those that all of them have, for trials of so many steps."""
        return {}


class NoScheduler(SchedulerRule):
    """Every trial is trained to its end."""

    tune_class = "FIFOScheduler"
    is_timed = False

    name: Literal["none"] = "none"


class Asha(SchedulerRule):
    """Asynchronous successive halving: at each rung only the best 1/`reduction_factor` go on. `grace_steps` is the first rung, by default one evaluation."""

    tune_class = "ASHAScheduler"

    name: Literal["asha"] = "asha"
    grace_steps: PositiveInt | None = None
    reduction_factor: Annotated[float, Field(gt=1)] = 3.0

    def arguments(self, total_steps: int, first_evaluation: int) -> dict[str, Any]:
        return {
            "max_t": total_steps,
            "grace_period": min(self.grace_steps or first_evaluation, total_steps),
            "reduction_factor": self.reduction_factor,
            "stop_last_trials": False,
        }


class Median(SchedulerRule):
    """A trial ends whose best value is worse than the median of the others' means up to that step."""

    tune_class = "MedianStoppingRule"

    name: Literal["median"] = "median"
    grace_steps: PositiveInt | None = None
    min_trials: PositiveInt = 3

    def arguments(self, total_steps: int, first_evaluation: int) -> dict[str, Any]:
        return {
            "grace_period": self.grace_steps or first_evaluation,
            "min_samples_required": self.min_trials,
            "hard_stop": False,  # else it cannot hear of a trial again that it would have ended
        }


class Pbt(SchedulerRule):
    """Population-based training: each `every_steps` the worst `quantile` take over the state of one of the best, with other values.

    The population waits for its last member, so that what it does depends on results alone and not on who was first.
    """

    tune_class = "PopulationBasedTraining"
    has_population = True

    name: Literal["pbt"] = "pbt"
    every_steps: PositiveInt = Field(examples=[100])
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25

    def arguments(self, total_steps: int, first_evaluation: int) -> dict[str, Any]:
        return {
            "perturbation_interval": self.every_steps,
            "quantile_fraction": self.quantile,
            "resample_probability": self.resample,
            "synch": True,
            "log_config": False,
        }


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Scheduler = Annotated[
    Annotated[NoScheduler | Asha | Median | Pbt, Field(discriminator="name")], BeforeValidator(_named)
]
