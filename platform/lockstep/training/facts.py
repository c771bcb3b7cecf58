"""What a run states about itself before its first step, and what its ranks must agree on to train together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.communication.group import Group
from lockstep.data.dataset import is_table
from lockstep.data.fingerprint import fingerprint
from lockstep.data.leakage import find_leakage
from lockstep.data.loader import MicroBatches
from lockstep.errors import DriftError
from lockstep.job.identity import identity_digest, identity_fields
from lockstep.job.interface import Job, overrides
from lockstep.job.loading import dataset_size
from lockstep.plan import Plan
from lockstep.randomness import seeds
from lockstep.record.environment import environment
from lockstep.spec.fields import Spec
from lockstep.spec.sample_ids import described
from lockstep.training.compiled import CompiledLosses, identity_of_compiler
from lockstep.training.determinism import fp32_products, numerics_probe
from lockstep.training.evaluate import Evaluation
from lockstep.training.failure import as_lockstep_error
from lockstep.training.job_phases import own_phases


def _own_fields(job: Job) -> dict[str, str]:
    """What a job adds to the identity. JobError where it fails or returns no mapping."""
    try:
        own = job.identity()
        return {f"job.identity.{name}": str(value) for name, value in own.items()}
    except (Exception, SystemExit) as error:  # the job's own code
        raise as_lockstep_error(error, "in identity") from error


def facts_of(
    spec: Spec,
    job: Job,
    group: Group,
    batches: MicroBatches,
    plan: Plan,
    evaluate: Evaluation | None,
    initial_digest: str,
    *,
    fork: str | None,
) -> dict[str, Any]:
    """The facts of a run, which its record begins with: identity and its fields, environment, seeds, workers and plan.

    `fork` names the run and step that its initial state is from, if any. Raises JobError where the job's `identity` fails.
    """
    device = group.device
    fields = identity_fields(
        spec,
        {
            **_own_fields(job),
            "data.train_samples": plan.samples,
            "data.eval_samples": evaluate.samples if evaluate else 0,
            **_fingerprints(batches, evaluate),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            **fp32_products(device),
            "numerics_probe": numerics_probe(device) if spec.determinism == "strict" else "not taken",
            "initial_weights_digest": initial_digest,
            "fork": fork,
            "workers": group.size,
        },
    )
    return {
        "identity": identity_digest(fields),
        "fields": fields,
        "environment": environment(spec),
        "seeds": seeds(spec.seed, phases=bool(own_phases(job)), frozen=overrides(job, "frozen_parameters")),
        "workers": group.size,
        "plan": _plan_facts(plan, evaluate),
        **({} if spec.data.without is None else {"without": _left_out(spec.data.without)}),
    }


def with_compiler(facts: dict[str, Any], compiled: CompiledLosses) -> dict[str, Any]:
    """The facts of a run whose losses are compiled: its identity includes the compiler, which affects the bits."""
    fields = facts["fields"] | identity_of_compiler(compiled)
    return {**facts, "fields": fields, "identity": identity_digest(fields)}


def _left_out(without: str) -> dict[str, str]:
    """The samples left out of training, which are kept as a file of their own."""
    return {"what": described(without), "ids": without}


def _fingerprints(batches: MicroBatches, evaluate: Evaluation | None) -> dict[str, Any]:
    """Fingerprints of the data, as fields `data.train.…` and `data.eval.…`."""
    every = {"train": batches} | ({"eval": evaluate.batches} if evaluate is not None else {})
    return {
        f"data.{name}.{field}": value
        for name, data in every.items()
        for field, value in fingerprint(data.samples, dataset_size(data.samples, name), data.seed).items()
    }


def leaked_rows(train_data: Any, eval_data: Any, seed: int, warn: Callable[[str], None]) -> int | None:
    """The number of evaluation samples that are training samples too, with a warning if any; None where they are not compared."""
    if eval_data is None:
        return None
    found = find_leakage(train_data, eval_data, seed)
    if found is None:
        return None
    if found.rows:
        drawn = "" if is_table(train_data) else " (both are opened under one seed: what both draw is equal)"
        warn(
            f"data: {found.described(len(eval_data))}; they flatter every metric: leave them out of one of the two{drawn}"
        )
    return found.rows


def _plan_facts(plan: Plan, evaluate: Evaluation | None) -> dict[str, int]:
    return {
        "train_samples": plan.samples,
        "eval_samples": evaluate.samples if evaluate else 0,
        "micro_batches": plan.micro_batches,
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
    }


def check_agreed(group: Group, own: dict[str, Any], spec: Spec) -> None:
    """Refuse to train where ranks differ in anything that enters the identity."""
    every = group.gather(own)
    for rank, other in enumerate(every):
        for field in sorted({*every[0], *other}):
            if other.get(field) == every[0].get(field):
                continue
            advice = {
                "numerics_probe": "these machines give other bits for the same program (another processor, library or number of "
                "threads): use machines of one kind",
                "initial_weights_digest": "the job's model must be made from the seeded generators alone",
            }.get(field, "all workers must run the same code on the same data")
            if spec.determinism == "strict":
                raise DriftError(
                    f"{field}: rank 0 has {every[0].get(field)}, rank {rank} has {other.get(field)}; {advice}"
                )
