"""The metrics of a whole evaluation set, which rank 0 alone computes: what the job keeps of them, no other worker has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn

from lockstep.job.interface import Job
from lockstep.training.evaluation import whole_set_metrics
from lockstep.training.integrity import problems
from lockstep.training.integrity.rehearsal.names_of_objects import memory_of, named


class WholeSetWatch:
    """Calls a job's whole-set functions, and looks at what they keep where it `compares`."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.seed = job, seed
        self.compares = False
        self.values: list[Mapping[str, str]] = []
        """What the job held after each call that changed something."""

    def compute(
        self,
        model: nn.Module,
        outputs: whole_set_metrics.Outputs,
        others: Callable[[], Iterable[Mapping[str, str]]] = tuple,
    ) -> whole_set_metrics.WholeSet:
        """The job's whole-set metrics and figures of some outputs. JobError where the job keeps something of them: only rank 0 would have it.

        `others` gives what the job holds after other outputs; it is called before these.
        """
        if not self.compares:
            return whole_set_metrics.compute(self.job, outputs, seed=self.seed)
        before, further = memory_of(self.job, model), [*others()]
        result = whole_set_metrics.compute(self.job, outputs, seed=self.seed)
        after = memory_of(self.job, model)
        changed = after.changed_since(before, beside=result.objects)
        if changed:
            self.values = [*self.values, after.values, *further]
        retained = [place for place in changed if before.keeps(place, after.values, *self.values)]
        if retained:
            raise problems.WHOLE_SET_KEEPS(got=named(retained))
        return result
