"""What a run states about itself before its first step, and what its ranks must agree on to train together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep.communication.group import Group
from lockstep.data.contents import UnreadableError, tree_of
from lockstep.data.dataset import is_table
from lockstep.data.fingerprint import fingerprint
from lockstep.data.leakage import find_leakage
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import LeftOut
from lockstep.files import as_text
from lockstep.job.identity import (
    DELAY,
    FIRST_MICRO_BATCH,
    PARAM,
    VARIABLE,
    differences,
    identity_digest,
    identity_fields,
    shown,
)
from lockstep.job.inputs.external_facts import FILE, MOVED
from lockstep.job.inputs.imports import distribution_fields, imported_by, source_fields
from lockstep.job.interface import Job, overrides
from lockstep.plan import Plan
from lockstep.randomness import seeds
from lockstep.record.environment import environment
from lockstep.record.events.union import SOURCE
from lockstep.spec.fields import Spec
from lockstep.spec.id_ranges import described
from lockstep.training import problems
from lockstep.training.determinism import numerics_probe, numpy_probe
from lockstep.training.evaluation.held_out_sets import EvaluationSets
from lockstep.training.external_inputs import external_inputs_of
from lockstep.training.failure import as_lockstep_error, job_at
from lockstep.training.identity_inputs import places_here, variables_read
from lockstep.training.job_data import JobData, dataset_size, shown_label
from lockstep.training.step.compiled import CompiledLosses, identity_of_compiler
from lockstep.training.step.phases import own_phases
from lockstep.training.torch_settings import Settings


def _own_fields(job: Job) -> dict[str, Any]:
    """What a job adds to the identity. JobError where it fails, returns no mapping or what cannot be looked into."""
    try:
        fields = {str(name): tree_of(value) for name, value in job.identity().items()}
    except UnreadableError as error:
        raise problems.IDENTITY_CONTENT(kind=error.kind, reason=error.reason) from error
    except (Exception, SystemExit) as error:  # the job's own code
        raise as_lockstep_error(error, "in identity") from error
    return {f"job.identity.{name}": value for name, value in fields.items()}


def facts_of(
    spec: Spec,
    job: Job,
    group: Group,
    batches: MicroBatches,
    plan: Plan,
    evaluate: EvaluationSets | None,
    versions: Mapping[str, str],
    initial_digest: str,
    first_digest: str,
    settings: Settings,
    *,
    fork: str | None,
    followed: Sequence[str] = (),
) -> dict[str, Any]:
    """The facts of a run, which its record begins with: identity and its fields, environment, seeds, workers and plan.

    `versions` are the fields for the versions of changing tables, `followed` the metrics that the schedule follows. `fork` names the run and step that its initial state is from, if any. Raises JobError where the job's `identity` fails.
    """
    device, strict = group.device, spec.determinism == "strict"
    imported = imported_by(spec.job.use, job)
    files = imported.files
    variables, places = variables_read(job, group, imported.paths)
    external = external_inputs_of(spec, job, group, imported)
    fields = identity_fields(
        spec,
        {
            **source_fields(files),
            **distribution_fields(imported.distributions),
            **_own_fields(job),
            "data.train_samples": plan.samples,
            **({} if plan.by_length is None else plan.by_length.fields),
            **({} if evaluate and evaluate.evaluated else {"data.eval_samples": 0}),
            **{
                f"data.{each.label}_samples": dataset_size(each.batches.samples, each.label)
                for each in evaluate or ()
            },
            **versions,
            **_fingerprints(spec, batches, evaluate),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            **({DELAY: spec.evaluate.delay} if followed and spec.evaluate.delay else {}),
            **settings.fields(),
            **variables,
            **external.fields,
            "numerics_probe": numerics_probe(device) if strict else "not taken",
            "numerics_probe.numpy": numpy_probe() if strict else "not taken",
            "initial_weights_digest": initial_digest,
            FIRST_MICRO_BATCH: first_digest if strict else "not taken",
            "fork": fork,
            "workers": group.size,
        },
    )
    return {
        "identity": identity_digest(fields),
        "fields": fields,
        "environment": {
            **environment(device),
            **external.environment,
            MOVED: {**places_here(), **places, **external.facts},
        },
        "seeds": seeds(spec.seed, phases=bool(own_phases(job)), frozen=overrides(job, "frozen_parameters")),
        "workers": group.size,
        "plan": _plan_facts(plan, evaluate),
        **({SOURCE: {path: as_text(content) for path, content in files.items()}} if files else {}),
        **({} if spec.data.without is None else {"without": _left_out(spec.data.without)}),
    }


def with_compiler(facts: dict[str, Any], compiled: CompiledLosses) -> dict[str, Any]:
    """The facts of a run whose losses are compiled: its identity includes the compiler, which affects the bits."""
    fields = facts["fields"] | identity_of_compiler(compiled)
    return {**facts, "fields": fields, "identity": identity_digest(fields)}


def _left_out(without: str) -> dict[str, str]:
    """The samples left out of training, which are kept as a file of their own."""
    return {"what": described(without), "ids": without}


def _fingerprints(spec: Spec, batches: MicroBatches, evaluate: EvaluationSets | None) -> dict[str, Any]:
    """Fingerprints of the data, as fields `data.train.…` and `data.eval.…`."""
    without = {"train": LeftOut(spec.data.without)}
    nothing = LeftOut(None)
    fingerprints = dict[str, Any]()
    for name, data, size in _data_sets(batches, evaluate):
        with job_at(f"in fingerprint of {shown_label(name)}"):
            fields = fingerprint(data.samples, size, data.seed, without.get(name, nothing).has_one)
        fingerprints |= {f"data.{name}.{field}": value for field, value in fields.items()}
    return fingerprints


def _data_sets(
    batches: MicroBatches, evaluate: EvaluationSets | None
) -> Iterator[tuple[str, MicroBatches, int]]:
    every = {"train": batches} | {each.label: each.batches for each in evaluate or ()}
    for name, data in every.items():
        yield name, data, dataset_size(data.samples, name)


def leaked_rows(data: JobData, seed: int, warn: Callable[[str], None]) -> int | None:
    """The number of held-out samples that are training samples too, with a warning for each set that has any; None where none is compared."""
    rows: list[int] = []
    for label, held_out in data.held_out.items():
        leakage = find_leakage(data.train, held_out, seed)
        if leakage is None:
            continue
        rows.append(leakage.rows)
        if leakage.rows:
            drawn = (
                "" if is_table(data.train) else " (both are opened under one seed: what both draw is equal)"
            )
            which = "" if label == "eval" else f", {shown_label(label)}"
            warn(
                f"data: {leakage.described(len(held_out))}{which}; they flatter every metric: leave them out of one of the two{drawn}"  # type: ignore[arg-type]
            )
    return sum(rows) if rows else None


def _plan_facts(plan: Plan, evaluate: EvaluationSets | None) -> dict[str, int]:
    return {
        "train_samples": plan.samples,
        "eval_samples": sum(each.samples for each in evaluate.evaluated.values()) if evaluate else 0,
        "micro_batches": plan.micro_batches,
        **({"steps_per_epoch": plan.steps_per_epoch} if plan.is_constant else {}),
        "total_steps": plan.total_steps,
    }


def check_agreed(group: Group, own: dict[str, Any], spec: Spec) -> None:
    """Refuse to train where ranks differ in anything that enters the identity."""
    every = group.gather(own)
    for rank, fields in enumerate(every):
        for name, first, second in differences(every[0], fields):
            if spec.determinism == "strict":
                raise problems.IDENTITIES_DIFFER(
                    name=name, wanted=shown(first), rank=rank, got=shown(second), remedy=_advice(name)
                )


def _advice(name: str) -> str:
    """What to do where ranks differ in a value of the identity."""
    if name.startswith("numerics_probe"):
        return (
            "these machines give other bits for the same program (another processor, library or number of threads): use machines "
            "of one kind"
        )
    if name.startswith(PARAM):
        return "its default depends on the process or the machine: set it in the spec, or declare it as lockstep.Placement"
    if name.startswith(VARIABLE):
        return (
            "the job reads it: give every worker the same, or have the job declare it in placement_variables"
        )
    if name.startswith(FILE):
        return "the job reads it: give every worker the same file"
    if name == FIRST_MICRO_BATCH:
        return (
            "the same spec, source, data and variables gave another loss or gradient there: look for what differs between the workers and is no "
            "part of the identity, such as a file that the job reads or a library"
        )
    if name == "initial_weights_digest":
        return "the job's model must be made from the seeded generators alone"
    return "all workers must run the same code on the same data"
