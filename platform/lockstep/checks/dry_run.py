"""The arithmetic of a run before it is run: which worker runs what, and how much is sent for it."""

from __future__ import annotations

from typing import Any

from lockstep.data.dataset import is_table
from lockstep.data.leakage import Leakage, find_leakage, leaked_rows
from lockstep.job.loading import load_job
from lockstep.plan import Plan
from lockstep.reduction_tree import nodes
from lockstep.spec.fields import Spec
from lockstep.spec.sharding import Sharding
from lockstep.training.job_data import JobData, check_rules, dataset_size, make_sampler, open_data
from lockstep.training.planning import make_plan

LEAKAGE_S = 20.0
"""How long a dry run may look for evaluation samples that are training samples; training itself looks for half a second."""


_SHARDED = {
    "optimizer": "the optimizer's state",
    "full": "the parameters, the gradients and the optimizer's state",
}
"""What the workers share out, by the spec's `sharding`."""


def dry_run(spec: Spec) -> dict[str, Any]:
    """The resolved spec and the plan's arithmetic for 1 … workers.max workers, as plain data.

    Loads the job and its data as training does, and makes no model. Raises what the run itself would raise for them.
    """
    job = load_job(spec.job.use, spec.job.params)
    data = open_data(job, spec.seed)
    train_data = data.train
    check_rules(spec, data)
    plan = make_plan(spec, job, train_data)
    check_order(train_data, plan, spec)
    epoch = 0 if plan.is_constant else plan.epochs - 1
    last = plan.position((plan.steps_before(epoch + 1) or plan.total_steps) - 1)
    most = min(spec.workers.max, plan.micro_batches)
    return {
        "spec": spec.document(),
        "plan": {
            "train_samples": plan.samples,
            "eval_samples": sum(
                _evaluated_samples(spec, label, held_out) for label, held_out in data.evaluated.items()
            ),
            "global_batch": plan.global_batch,
            "micro_batch": plan.micro_batch,
            "micro_batches": plan.micro_batches,
            "steps_per_epoch": plan.steps_per_epoch if plan.is_constant else None,
            "epochs": plan.epochs,
            "total_steps": plan.total_steps,
            "last_step_of_an_epoch": {"samples": last.samples, "micro_batches": last.micro_batches},
            "dropped_samples_per_epoch": plan.samples - last.start - last.samples if plan.drop_last else 0,
            **_changing(plan),
            "leakage": _leakage(data, spec.seed),
            "workers": [_spread(plan, workers) for workers in range(spec.workers.min, most + 1)],
        },
    }


def _changing(plan: Plan) -> dict[str, Any]:
    """Where the size of the global batch changes, and what tokens bound, as far as they do."""
    facts: dict[str, Any] = {}
    if not plan.is_constant:
        facts["global_batches"] = [
            {"size": size, "from_step": step + 1, "from_epoch": epoch} for size, step, epoch in plan.changes()
        ]
    if plan.tokens is not None and plan.by_length is not None:
        facts |= {"tokens": plan.tokens, "micro_batches_per_epoch": plan.by_length.count}
    return facts


def check_order(train_data: Any, plan: Plan, spec: Spec) -> None:
    """Draw the first micro-batch's samples, without fetching them. Raises what training would raise for their order."""
    sampler = make_sampler(spec, plan, train_data, range(1))
    sampler.check_order()
    next(iter(sampler))


def _evaluated_samples(spec: Spec, label: str, data: Any) -> int:
    """How many samples of a set an evaluation computes."""
    size, limit = dataset_size(data, label), spec.evaluate.of(label.partition("/")[2]).limit
    return min(size, limit or size)


def _leakage(data: JobData, seed: int) -> dict[str, int] | None:
    """Evaluation samples that are training samples too, in the set that has most of them; and how many were compared, if not all were."""
    every = [leakage_of(data.train, held_out, seed, LEAKAGE_S) for held_out in data.held_out.values()]
    worst = max(
        (leakage for leakage in every if leakage is not None), key=lambda leakage: leakage.rows, default=None
    )
    return worst and {name: value for name, value in worst._asdict().items() if value is not None}


def leakage_of(train_data: Any, eval_data: Any, seed: int, within_s: float) -> Leakage | None:
    """Evaluation samples that are training samples too. Tables are compared whole, however long it takes; None where it cannot be told."""
    if is_table(train_data) and is_table(eval_data):
        return leaked_rows(train_data, eval_data)
    return find_leakage(train_data, eval_data, seed, within_s)


def _spread(plan: Plan, workers: int) -> dict[str, Any]:
    """Who runs which micro-batches on so many workers, and the partial sums that each sends (`sums`)."""
    ranges = plan.ranges(workers)
    return {
        "workers": workers,
        "micro_batch_ranges": [f"{r.start}-{r.stop - 1}" for r in ranges],
        "accumulation_steps": [len(r) for r in ranges],
        "sums": [len(nodes(r, plan.micro_batches)) for r in ranges],
    }


def _sharded(sharding: Any) -> list[str]:
    """What a spec's `sharding` says, as lines."""
    settings = Sharding.model_validate({"mode": sharding} if isinstance(sharding, str) else sharding)
    if settings.mode == "none":
        return []
    lines = [
        f"sharding          of W workers each keeps 1/W of {_SHARDED[settings.mode]}, and the bits are the same"
    ]
    if settings.mode == "full":
        units = "the blocks that the model repeats" if settings.units is None else ", ".join(settings.units)
        again = (
            "and again for its backward" if settings.reshard_after_forward else "and kept until its backward"
        )
        lines.append(f"units             {units}: gathered {settings.prefetch} ahead, {again}")
        lines.append(
            "memory            `lockstep estimate` measures it, what a step sends, and how many units fit"
        )
    if settings.offload:
        lines.append("rows              in host memory, and copied to the device to compute with them")
    return lines


def as_text(report: dict[str, Any]) -> str:
    """The plan of a dry run as lines for a person."""
    plan = report["plan"]
    at_most = "at most " if "tokens" in plan or "global_batches" in plan else ""
    bound = f" and {plan['tokens']} padded tokens" if "tokens" in plan else ""
    per_epoch = "" if plan["steps_per_epoch"] is None else f"{plan['steps_per_epoch']} steps an epoch, "
    lines = [
        f"global batch      {at_most}{plan['global_batch']} samples = {plan['micro_batches']} micro-batches of {'at most ' if bound else ''}"
        f"{plan['micro_batch']}{' samples' if bound else ''}{bound}",
        *(
            f"                  {each['size']} samples from step {each['from_step']}, in epoch {each['from_epoch']}"
            for each in plan.get("global_batches", ())
        ),
        f"training          {plan['train_samples']} samples, {per_epoch}"
        f"{plan['epochs']} epochs, {plan['total_steps']} steps in all",
        f"evaluation        {plan['eval_samples']} samples",
    ]
    if (plan["leakage"] or {}).get("rows"):
        leakage = Leakage(**plan["leakage"])
        lines.append(f"leakage           {leakage.described(plan['eval_samples'])}")
    lines += _sharded(report["spec"]["sharding"])
    tail = plan["last_step_of_an_epoch"]
    if plan["dropped_samples_per_epoch"]:
        lines.append(
            f"dropped           {plan['dropped_samples_per_epoch']} samples an epoch (data.drop_last)"
        )
    elif "tokens" not in plan and tail["samples"] < plan["global_batch"]:
        lines.append(
            f"last step         {tail['samples']} samples in {tail['micro_batches']} micro-batches, weighted exactly"
        )
    for spread in plan["workers"]:
        shares = ", ".join(
            f"worker {rank}: {micro_batch_range} ({steps} accumulation steps, sends {sums})"
            for rank, (micro_batch_range, steps, sums) in enumerate(
                zip(spread["micro_batch_ranges"], spread["accumulation_steps"], spread["sums"], strict=True)
            )
        )
        lines.append(f"on {spread['workers']} worker{'s' if spread['workers'] > 1 else ' '}      {shares}")
    return "\n".join(lines)
