"""The arithmetic of a run over the samples of its job."""

from __future__ import annotations

from typing import Any

from lockstep.data.by_length import grouped_by_length
from lockstep.data.dataset_order import number_of_ids
from lockstep.data.sampler import LeftOut
from lockstep.job.interface import Job, Updates
from lockstep.plan import Plan
from lockstep.spec.fields import Spec
from lockstep.training import problems
from lockstep.training.job_data import dataset_size, lengths_of


def updates_of(plan: Plan) -> Updates:
    """What a schedule of the job's own is told of the run's length."""
    return Updates(plan.total_steps, plan.steps_per_epoch if plan.is_constant else None, plan.epochs)


def make_plan(spec: Spec, job: Job, train_data: Any) -> Plan:
    """The arithmetic of the run over its training samples. Where their order goes by length, the job is asked for the lengths."""
    samples = dataset_size(train_data, "train_data")
    left_out = LeftOut(spec.data.without)
    check_ids(left_out, train_data, "data.without")
    by_length = None
    if samples and spec.data.shuffle == "by_length":
        by_length = grouped_by_length(spec, lengths_of(job, train_data, samples), left_out)
    if samples and left_out.count == number_of_ids(train_data):
        raise problems.ALL_LEFT_OUT(got=left_out.count)
    try:
        return Plan.of(
            samples,
            spec.batch.sizes,
            spec.batch.micro,
            drop_last=spec.data.drop_last,
            epochs=spec.length.epochs,
            steps=spec.length.steps,
            group=spec.data.group_size,
            tokens=spec.batch.tokens if samples else None,
            by_length=by_length,
        )
    except ValueError as error:
        advice = (
            "lower batch.global or set data.drop_last=false"
            if samples
            else "train_data holds no sample: give it some"
        )
        raise problems.NO_PLAN(got=error, remedy=advice) from error


def check_ids(ids: LeftOut, train_data: Any, name: str) -> None:
    """SpecError for ids that no training sample has."""
    count = number_of_ids(train_data)
    if count and ids.last >= count:
        raise problems.NO_SUCH_SAMPLE(field=name, got=ids.last, wanted=count)
