"""What a spec and a schedule say of metrics, held against those that the evaluations give."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.errors import nearest
from lockstep.spec.fields import Spec
from lockstep.training import problems
from lockstep.training.job_data import is_test
from lockstep.training.step.learning_rate import RateSchedule


def check_metric(spec: Spec, metrics: Iterable[str] | None) -> None:
    """SpecError where a rule needs a metric that the evaluation does not give. `metrics` is None where they are not known yet."""
    if metrics is None:
        return
    rules = {"early_stop": spec.early_stop, "checkpoint.keep_best": spec.checkpoint.keep_best}
    metrics = [name for name in metrics if not is_test(name)]
    for name, rule in rules.items():
        if rule is not None and is_test(rule.metric):
            raise problems.TEST_DECIDES(field=f"{name}.metric", got=rule.metric)
        if rule is not None and rule.metric not in metrics:
            raise problems.NO_METRIC(
                field=f"{name}.metric", got=rule.metric, hint=nearest(rule.metric, metrics)
            )


def check_followed(schedule: RateSchedule, metrics: Iterable[str] | None) -> None:
    """JobError where the job's schedule follows a metric that the evaluation does not give; `metrics` as for `check_metric`."""
    if metrics is None:
        return
    metrics = [name for name in metrics if not is_test(name)]
    for name in schedule.metrics:
        if is_test(name):
            raise problems.TEST_DECIDES(field="job.schedule", got=name)
        if name not in metrics:
            what = (
                f"its evaluations give none{nearest(name, metrics)}"
                if metrics
                else "the job has no eval_data"
            )
            raise problems.SCHEDULE_METRIC(got=name, wanted=what)
