"""The validated configuration of a run.

Types are strict, because a spec is compared and digested: neither text nor a boolean counts as a number, so "3" is not 3.
A whole number is accepted wherever any number is. (`job.params` belong to the job and follow pydantic's usual rules.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lockstep.errors import nearest
from lockstep.plan import Position, is_due
from lockstep.spec.alert import Alert
from lockstep.spec.batch import Batch
from lockstep.spec.compiling import Compile, CompiledUnits
from lockstep.spec.id_ranges import normal
from lockstep.spec.messages import FieldError, shown
from lockstep.spec.optimizers import AdamW, Optimizer
from lockstep.spec.schedules import Constant, Schedule
from lockstep.spec.section import Section
from lockstep.spec.sharding import Sharding, ShardingOrMode

PLACEMENT = frozenset({"name", "sharding", "workers", "checkpoint", "record", "faults", "rehearsal", "alert"})
"""Sections of the spec that are no part of the identity; a job's placement params are none either."""

MOST_PER_WORKER = 1024
"""The most threads, and the most processes that fetch: a slip of the pen must not fill a machine."""

PLACEMENT_FIELDS = {"data": "loader_processes", "determinism": "recheck", "evaluate": "beside"}
"""By section, the field that is placement though its section is not."""

RECHECK = "determinism.recheck"
"""How `recheck` is written: `determinism` may be a mapping of `mode` and `recheck`."""


def _plain(value: Any) -> Any:
    """Plain data come back from JSON as they went; anything else would not survive a record or a resume."""
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            "wanted plain data: text, finite numbers, true, false, null, lists, mappings of text"
        )
    return value


class JobSpec(Section):
    """Which job, with which params."""

    use: str = Field(examples=['"package.module:Class"'])
    params: dict[str, Annotated[Any, AfterValidator(_plain)]] = Field(default={})


class _Count(Section):
    """Exactly one of its fields: whole epochs, or optimizer steps."""

    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        *others, last = type(self).model_fields
        if sum(getattr(self, name) is not None for name in (*others, last)) != 1:
            raise ValueError(f"wanted exactly one of {', '.join(others)} and {last}")
        return self


class Length(_Count):
    """How long to train, in epochs or in steps."""


class Every(_Count):
    """A cadence: each so many epochs, or each so many steps."""

    def due(self, position: Position) -> bool:
        """Whether it is due after the step at `position`."""
        return is_due(position, steps=self.steps, epochs=self.epochs)


_SampleIds = Annotated[
    str, BeforeValidator(lambda value: str(value) if type(value) is int else value), AfterValidator(normal)
]


class Group(Section):
    """Neighbours in the order of an epoch that share a micro-batch."""

    size: PositiveInt


class Data(Section):
    """The order of the samples and who fetches them."""

    shuffle: Literal["full", "hashed", "blocks", "by_length", "none"] = "full"
    window: PositiveInt = 8
    drop_last: bool = True
    loader_processes: Annotated[NonNegativeInt, Field(le=MOST_PER_WORKER)] = 0
    without: _SampleIds | None = None
    group: Group | None = None

    @property
    def group_size(self) -> int:
        """How many neighbours share a micro-batch; 1 where none have to."""
        return 1 if self.group is None else self.group.size


class EvaluationSet(Section):
    """What holds for one of several sets; what is left out is that of all."""

    every: Every | None = None
    limit: PositiveInt | None = None


def _delay(values: dict[str, Any]) -> int | Literal["next"]:
    return "next" if values.get("beside") else 0


class Evaluate(Section):
    """When the held-out data are evaluated, how many samples of them, and when that decides; the end of the run always is evaluated.

    `delay` is in steps; `next` stands for the steps until another evaluation is due.
    """

    every: Every = Every(epochs=1)
    limit: PositiveInt | None = None
    sets: dict[str, EvaluationSet] = Field(default={})
    beside: bool = False
    delay: NonNegativeInt | Literal["next"] = Field(default_factory=_delay)

    def of(self, name: str) -> EvaluationSet:
        """The cadence and the limit of the set `name`, which is empty where the job has one set without a name."""
        settings = self.sets.get(name, EvaluationSet())
        return EvaluationSet(every=settings.every or self.every, limit=settings.limit or self.limit)


class _ByMetric(Section):
    """A rule that goes by one metric of the evaluations."""

    metric: str = "eval/loss"
    mode: Literal["min", "max"] = "min"

    @model_validator(mode="after")
    def _names_what_rises(self) -> Self:
        if self.mode == "max" and "metric" not in self.model_fields_set:
            raise ValueError(
                "wanted the name of a metric beside mode=max, such as metric=eval/accuracy: eval/loss falls as the model improves"
            )
        return self

    def cost(self, value: float) -> float:
        """A value of the metric as one that falls as the model improves."""
        return value if self.mode == "min" else -value


class EarlyStop(_ByMetric):
    """Stop after `patience` evaluations without a better metric, or once it has reached `threshold`; the best weights are kept."""

    patience: PositiveInt | None = 5
    threshold: FiniteFloat | None = None

    @model_validator(mode="after")
    def _stops(self) -> Self:
        if self.patience is None and self.threshold is None:
            raise ValueError("wanted a number of evaluations as patience, or a threshold, or both")
        return self

    def reached_by(self, value: float) -> bool:
        """Whether a value of the metric is as good as the threshold."""
        return self.threshold is not None and self.cost(value) <= self.cost(self.threshold)


class Workers(Section):
    """How many processes execute the run, and which resources each gets."""

    min: PositiveInt = 1
    max: PositiveInt = Field(default_factory=lambda workers: int(workers["min"]))
    cpus_each: PositiveFloat = 1.0
    gpus_each: NonNegativeFloat | Literal["auto"] = "auto"
    bucket_mb: PositiveFloat = 25.0

    @field_validator("max")
    @classmethod
    def _ordered(cls, most: int, info: ValidationInfo) -> int:
        least = info.data.get("min", most)  # absent where it is wrong itself
        if most < least:
            raise ValueError(f"wanted at least workers.min = {least}")
        return most


class Cadence(Every):
    """When the state is saved: each so many epochs, steps or seconds, exactly one of the three."""

    seconds: PositiveFloat | None = None

    def due_after(self, elapsed_s: float) -> bool:
        """Whether it counts seconds, and is due `elapsed_s` seconds after the last save."""
        return self.seconds is not None and elapsed_s >= self.seconds


class KeepBest(_ByMetric):
    """The checkpoint with the best value of an evaluation's metric is kept."""


class Checkpoint(Section):
    """Where the files of runs are kept, `<storage>/<run_id>/`; when the state is saved, and which checkpoints stay."""

    storage: str = "runs"
    every: Cadence | None = Cadence(seconds=300.0)
    keep_last: PositiveInt = 2
    keep_best: KeepBest | None = None
    keep_every: PositiveInt | None = None
    verify_after_s: NonNegativeFloat | None = 60.0


class Fork(Section):
    """Start from the state of another run after a step, its counters and optimizer included."""

    run: str
    step: PositiveInt | None = None
    storage: str | None = None
    exact: bool = False


class Record(Section):
    """The MLflow tracking store, and the folder of the run's files, `<folder>/<run_id>/`; with `uri: off` everything is recorded there only."""

    uri: str | None = None
    experiment: str | None = None
    folder: str | None = None
    checkpoints: Literal["reference", "artifact"] = "artifact"
    copy_mb_per_s: PositiveFloat | None = 100.0
    digest_every: PositiveInt | None = 100
    observe_every: PositiveInt | None = 50
    private: bool = False


class Faults(Section):
    """How often an attempt may end early before the run does: for workers that were lost, and for errors of the job."""

    max_worker_failures: NonNegativeInt = 3
    max_job_errors: NonNegativeInt = 0
    wait_for_workers_s: NonNegativeFloat = 600.0
    longest_start_s: PositiveFloat = 3600.0
    longest_silence_s: PositiveFloat = 300.0
    mirror: bool = False
    health: bool = False


def _one_word(name: str) -> str:
    if "/" in name or "\\" in name or not name.isprintable():
        raise ValueError("wanted a name without slashes or control characters")
    return name


class Spec(Section):
    """The configuration of a run. The shortest valid one names only a job."""

    name: Annotated[str, AfterValidator(_one_word)] = ""
    job: JobSpec = Field(examples=['{use: "package.module:Class"}'])
    seed: int = Field(default=0, ge=0, lt=2**63)  # torch's generators take no larger one
    length: Length = Length(epochs=1)
    batch: Batch = Batch()
    data: Data = Data()
    optimizer: Optimizer = AdamW()
    schedule: Schedule = Constant()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    clip_norm: PositiveFloat | None = None
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    activation_checkpointing: bool = False
    compile: Compile = False
    initial_weights: str | None = None
    fork: Fork | None = None
    evaluate: Evaluate = Evaluate()
    early_stop: EarlyStop | None = None
    determinism: Literal["strict", "fast"] = "strict"
    recheck: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, alias=RECHECK)
    threads: Annotated[PositiveInt, Field(le=MOST_PER_WORKER)] = 1
    reduction: Literal["exact", "native"] = "exact"
    rehearsal: Literal["auto", "full", "quick", "off"] = "auto"
    sharding: ShardingOrMode = Sharding()
    workers: Workers = Workers()
    checkpoint: Checkpoint = Checkpoint()
    record: Record = Record()
    faults: Faults = Faults()
    alert: Alert = Alert()

    @model_validator(mode="before")
    @classmethod
    def _determinism_in_parts(cls, data: Any) -> Any:
        """`determinism: {mode: strict, recheck: 0.01}` as the two fields that it is."""
        if not isinstance(data, dict) or not isinstance(data.get("determinism"), dict):
            return data
        parts = {"mode": "strict", "recheck": None, **data["determinism"]}
        if unknown := sorted(map(str, parts.keys() - {"mode", "recheck"})):
            raise FieldError(
                f"determinism.{unknown[0]}", f"unknown key{nearest(unknown[0], ('mode', 'recheck'))}"
            )
        share = parts["recheck"]
        if share is not None and (
            isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1
        ):
            raise FieldError(
                RECHECK, f"got {shown(share)}, wanted a number from 0 to 1: the share of micro-batches"
            )
        return {**data, "determinism": parts["mode"], RECHECK: share}

    @model_validator(mode="before")
    @classmethod
    def _optimizer_sharded(cls, data: Any) -> Any:
        """`optimizer.sharded`, as 0.1 has it, as the `sharding` that it is; readable until 0.2."""
        optimizer = data.get("optimizer") if isinstance(data, dict) else None
        if not isinstance(optimizer, dict) or "sharded" not in optimizer:
            return data
        sharded = optimizer["sharded"]
        if not isinstance(sharded, bool):
            raise ValueError(f"optimizer.sharded: got {shown(sharded)}, wanted true or false")
        optimizer_fields = {name: value for name, value in optimizer.items() if name != "sharded"}
        middle = {"sharding": "optimizer", **data} if sharded else data
        return {**middle, "optimizer": optimizer_fields}

    @model_validator(mode="after")
    def _rechecks_bits(self) -> Self:
        for name, value in (("determinism.mode", self.determinism), ("reduction", self.reduction)):
            if self.recheck and value in ("fast", "native"):
                raise FieldError(
                    RECHECK,
                    f"got {self.recheck:g} with {name} {value}, which keeps no micro-batch's gradient to the bit; "
                    f"leave it out, or set {name}={'strict' if value == 'fast' else 'exact'}",
                )
        return self

    @model_validator(mode="after")
    def _shards_what_it_can(self) -> Self:
        """On one worker as well: whether a spec is valid must not depend on the number of workers."""
        if self.sharding.mode != "full":
            for name, value in self.sharding.of_units().items():
                raise FieldError(
                    f"sharding.{name}",
                    f"got {shown(value)} with sharding.mode {self.sharding.mode}, which gathers no units; set sharding.mode=full, or leave it out",
                )
            return self
        if self.sharding.offload and self.faults.mirror:
            raise FieldError(
                "sharding.offload",
                "got true with faults.mirror true, whose rows of another worker lie on the device; set faults.mirror=false, with which the run resumes from its last "
                "checkpoint when a worker is lost, or set sharding.offload=false",
            )
        if self.reduction == "native":
            raise ValueError(
                "sharding: got 'full' with reduction native, and the workers' rows are summed along the exact tree alone; set reduction=exact, or set "
                "sharding=optimizer"
            )
        if self.evaluate.beside:
            raise FieldError(
                "evaluate.beside",
                "got true with sharding full, where no process has the whole weights to evaluate; set evaluate.beside=false, or set sharding=optimizer",
            )
        if self.compile is True:
            raise ValueError(
                "sharding: got 'full' with compile true, which has one program for the whole loss, and FSDP gathers each unit of it in Python: under FSDP2 alone the "
                "program is cut at every unit, and computes other bits than that of a run on one worker; set compile=units, which has a program for each unit, or "
                "set sharding=optimizer"
            )
        return self

    @model_validator(mode="after")
    def _goes_by_length(self) -> Self:
        by_length, tokens = self.data.shuffle == "by_length", self.batch.tokens
        if by_length and self.data.group is not None:
            raise FieldError(
                "data.group",
                "got a group with data.shuffle=by_length, which puts samples of like lengths side by side, not those of a group; leave data.group out, or set "
                "data.shuffle=none",
            )
        if tokens is None:
            return self
        if not by_length:
            raise FieldError(
                "batch.tokens",
                f"got {tokens} with data.shuffle={self.data.shuffle}, where a micro-batch has samples of any length; set data.shuffle=by_length, or leave it out",
            )
        if self.compile:
            raise FieldError(
                "batch.tokens",
                f"got {tokens} with compile={shown(self.document()['compile'])}, and a program is compiled for one shape, while micro-batches then have many; set compile=false, or pad to one "
                "length and leave batch.tokens out",
            )
        if any(each.until_samples for each in self.batch.sizes):
            raise FieldError(
                "batch.global",
                "got until_samples with batch.tokens, where lengths decide how many samples a step has; use until_steps",
            )
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        size = self.data.group_size
        if self.batch.micro % size:
            raise FieldError(
                "data.group.size",
                f"got {size}, wanted a divisor of batch.micro = {self.batch.micro}: the samples of a group are in one micro-batch; set batch.micro to a "
                f"multiple of {size}",
            )
        return self

    @model_validator(mode="after")
    def _workers_fit(self) -> Self:
        if self.workers.min > self.batch.micro_batches:
            raise FieldError(
                "workers.min",
                f"got {self.workers.min}, wanted at most the {self.batch.micro_batches} micro-batches of a step, "
                "since every worker runs at least one; lower workers.min or batch.micro",
            )
        return self

    @property
    def folder(self) -> Path:
        """Where the record's files are kept, a folder a run."""
        return Path(self.record.folder or self.checkpoint.storage)

    def is_fully_sharded(self, workers: int) -> bool:
        """Whether so many workers shard the parameters: one alone shares nothing out."""
        return self.sharding.mode == "full" and workers > 1

    @property
    def mirrors_parameters(self) -> bool:
        """Whether workers have mirrors of sharded parameters, now or once they are more than one."""
        return self.sharding.mode == "full" and self.faults.mirror

    def document(self) -> dict[str, Any]:
        """The spec as plain data, as a spec file would write it."""
        document = self.model_dump(mode="json", by_alias=True)
        if (share := document.pop(RECHECK)) is not None:
            document["determinism"] = {"mode": self.determinism, "recheck": share}
        document["sharding"] = self.sharding.document()
        if isinstance(self.compile, CompiledUnits):
            document["compile"] = self.compile.document()
        return document
