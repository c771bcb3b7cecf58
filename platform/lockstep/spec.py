"""The validated configuration of a run.

A spec is read once, in the driver: unknown keys are refused with the nearest real one, relative paths and
URIs become absolute, defaults are filled in. What leaves this module is complete and immutable.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from lockstep.errors import SpecError, nearest

RECORD_OFF = "off"
"""The value of `record.uri` that keeps a run out of MLflow."""


class _Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class JobSpec(_Section):
    """Which job, with which params."""

    use: str
    params: dict[str, Any] = {}


class Length(_Section):
    """How long to train: whole epochs, or optimizer steps. Exactly one of the two."""

    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None

    @pydantic.model_validator(mode="after")
    def _one(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


class Batch(_Section):
    """Samples of a step and of one forward/backward; their ratio is the number of micro-batches M."""

    global_: PositiveInt = Field(default=64, alias="global")
    micro: PositiveInt

    @pydantic.model_validator(mode="before")
    @classmethod
    def _default_micro(cls, given: Any) -> Any:
        """An eighth of the global batch where that divides, so that a run can spread over eight workers."""
        if isinstance(given, dict) and given.get("micro") is None:
            size = given.get("global", 64)
            if isinstance(size, int) and size > 0:
                given = {**given, "micro": next(size // m for m in range(8, 0, -1) if size % m == 0)}
        return given

    @pydantic.model_validator(mode="after")
    def _divides(self) -> Self:
        if self.global_ % self.micro:
            divisors = [d for d in range(1, self.global_ + 1) if self.global_ % d == 0]
            near = min(divisors, key=lambda d: (abs(d - self.micro), d))
            raise ValueError(
                f"batch.micro = {self.micro} does not divide batch.global = {self.global_}; nearest that does: {near}"
            )
        return self

    @property
    def micro_batches(self) -> int:
        """M, the number of micro-batches of a full step."""
        return self.global_ // self.micro


class Data(_Section):
    """The order of the samples and who fetches them."""

    shuffle: Literal["full", "none"] = "full"
    drop_last: bool = True
    loader_processes: NonNegativeInt = 0


class AdamW(_Section):
    """torch.optim.AdamW."""

    name: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class Adam(_Section):
    """torch.optim.Adam."""

    name: Literal["adam"] = "adam"
    lr: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class SGD(_Section):
    """torch.optim.SGD."""

    name: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 1e-2
    weight_decay: NonNegativeFloat = 0.0
    momentum: NonNegativeFloat = 0.0
    nesterov: bool = False


class Constant(_Section):
    """The learning rate stays, after an optional linear warm-up."""

    name: Literal["constant"] = "constant"
    warmup_steps: NonNegativeInt = 0


class Linear(_Section):
    """Falls in a straight line to `final` times the learning rate at the last step."""

    name: Literal["linear"] = "linear"
    warmup_steps: NonNegativeInt = 0
    final: NonNegativeFloat = 0.0


class Cosine(_Section):
    """Falls along half a cosine to `final` times the learning rate at the last step."""

    name: Literal["cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    final: NonNegativeFloat = 0.0


class StepDecay(_Section):
    """Multiplied by `gamma` after every `every` steps that follow the warm-up."""

    name: Literal["step"] = "step"
    warmup_steps: NonNegativeInt = 0
    every: PositiveInt
    gamma: PositiveFloat = 0.1


class Every(_Section):
    """A cadence: each so many epochs, or each so many steps. Exactly one of the two."""

    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None

    @pydantic.model_validator(mode="after")
    def _one(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


class Evaluate(_Section):
    """When the held-out data are evaluated; the end of the run always is."""

    every: Every = Every(epochs=1)


class EarlyStop(_Section):
    """Stop after `patience` evaluations without a better metric; the best weights are kept."""

    metric: str = "eval/loss"
    mode: Literal["min", "max"] = "min"
    patience: PositiveInt = 5


class Workers(_Section):
    """How many processes execute the run, and what each is given."""

    min: PositiveInt = 1
    max: PositiveInt = 1
    cpus_each: PositiveFloat = 1
    gpus_each: NonNegativeFloat | Literal["auto"] = "auto"

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"workers.min = {self.min} is above workers.max = {self.max}")
        return self


class Storage(_Section):
    """Where the files of runs are kept: `<storage>/<run_id>/`."""

    storage: str = "runs"


class Record(_Section):
    """The MLflow tracking store; `uri: off` records in the run's own folder alone."""

    uri: str | None = None
    experiment: str | None = None


def _named(default: str) -> pydantic.BeforeValidator:
    """Fill in the name that tells the kinds of a section apart, so that it may be left out."""
    return pydantic.BeforeValidator(lambda given: {"name": default, **given} if isinstance(given, dict) else given)


Optimizer = Annotated[
    Annotated[AdamW | Adam | SGD, Field(discriminator="name")],
    _named("adamw"),
]
Schedule = Annotated[
    Annotated[Constant | Linear | Cosine | StepDecay, Field(discriminator="name")],
    _named("constant"),
]


class Spec(_Section):
    """A run as it is configured. The shortest valid one names a job and nothing else."""

    name: str = Field(default="", pattern=r"^[^/\\\x00]*$")
    job: JobSpec
    seed: NonNegativeInt = 0
    length: Length = Length(epochs=1)
    batch: Batch = Field(default_factory=lambda: Batch.model_validate({}))
    data: Data = Data()
    optimizer: Optimizer = AdamW()
    schedule: Schedule = Constant()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    clip_norm: PositiveFloat | None = None
    activation_checkpointing: bool = False
    initial_weights: str | None = None
    evaluate: Evaluate = Evaluate()
    early_stop: EarlyStop | None = None
    determinism: Literal["strict", "fast"] = "strict"
    threads: PositiveInt = 1
    reduction: Literal["exact", "native"] = "exact"
    workers: Workers = Workers()
    checkpoint: Storage = Storage()
    record: Record = Record()

    @pydantic.model_validator(mode="after")
    def _workers_fit(self) -> Self:
        if self.workers.min > self.batch.micro_batches:
            raise ValueError(
                f"workers.min = {self.workers.min} is more than the {self.batch.micro_batches} micro-batches of a step; "
                "a worker runs at least one: lower workers.min or batch.micro"
            )
        return self

    def document(self) -> dict[str, Any]:
        """The spec as plain data, as a spec file would write it."""
        return self.model_dump(mode="json", by_alias=True)


PLACEMENT_FIELDS = frozenset({"name", "workers", "checkpoint", "record"})
"""Sections that never change the bits of a run, and so are no part of its identity; `data.loader_processes` is another."""


def load_spec(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), *, uri: str | None = None
) -> Spec:
    """Read a spec from a YAML file or from plain data, apply `key=value` overrides, resolve paths.

    Raises SpecError: one line that names the field, what was got and what is wanted.
    """
    document = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else _read(Path(source))
    for override in overrides:
        _apply(document, override)
    spec = validate(document)
    return _resolve(spec, default_name=spec.name or _default_name(source, spec), uri=uri)


def validate(document: Mapping[str, Any]) -> Spec:
    """The spec of a complete document; SpecError for the first thing that is wrong with it."""
    try:
        return Spec.model_validate(document)
    except pydantic.ValidationError as error:
        raise SpecError(_message(error)) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"spec: cannot read {str(path)!r}: {error}") from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise SpecError(f"spec: {path}{line} is not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(document, dict):
        raise SpecError(f"spec: {path} holds {type(document).__name__}, wanted a mapping of fields")
    return document


def _apply(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise SpecError(f"override: got {override!r}, wanted key=value such as optimizer.lr=1e-3")
    try:
        value = _number(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise SpecError(f"override: the value of {override!r} is not YAML") from error
    section = document
    for part in parts[:-1]:
        inner = section.setdefault(part, {})
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            raise SpecError(f"override: {override!r} goes into {part!r}, which holds {inner!r} and has no fields")
        section = inner
    leaf = parts[-1]
    if isinstance(value, dict) or parts[0] not in {"length", "evaluate"}:
        section[leaf] = value
    else:  # epochs and steps exclude each other: the one that is given replaces the other
        for rival in {"epochs", "steps"} - {leaf}:
            if leaf in {"epochs", "steps"}:
                section.pop(rival, None)
        section[leaf] = value


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` as a string; a person means a number."""
    if isinstance(value, str):
        try:
            return float(value) if any(c.isdigit() for c in value) else value
        except ValueError:
            return value
    return value


def _default_name(source: str | Path | Mapping[str, Any], spec: Spec) -> str:
    if not isinstance(source, Mapping) and Path(source).stem not in {"train", "spec"}:
        return Path(source).stem
    return spec.job.use.rpartition(":")[2].lower() or "run"


def _resolve(spec: Spec, *, default_name: str, uri: str | None) -> Spec:
    record = spec.record
    tracking = uri or record.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    return spec.model_copy(
        update={
            "name": default_name,
            "initial_weights": _absolute(spec.initial_weights) if spec.initial_weights else None,
            "checkpoint": spec.checkpoint.model_copy(update={"storage": _absolute(spec.checkpoint.storage)}),
            "record": record.model_copy(
                update={"uri": _absolute_uri(tracking), "experiment": record.experiment or default_name}
            ),
        }
    )


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _absolute_uri(uri: str) -> str:
    """A tracking URI that means the same from every working directory."""
    scheme, separator, rest = uri.partition(":///")
    if separator and scheme.startswith("sqlite"):
        return f"{scheme}:///{Path(rest).expanduser().absolute()}" if rest and rest != ":memory:" else uri
    return uri


def _message(error: pydantic.ValidationError) -> str:
    """One line for the first finding; pydantic's own words where they say it well."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"] if part not in _KINDS]
    field = ".".join(location)
    kind = first["type"]
    if kind == "extra_forbidden":
        return f"{field}: unknown key{nearest(location[-1], _keys_at(location[:-1], first['loc']))}"
    if kind == "missing":
        return f"{field}: missing; a spec names at least its job, such as job: {{use: \"package.module:Class\"}}" if field.startswith(
            "job"
        ) else f"{field}: missing"
    if kind == "value_error":
        text = str(first["ctx"]["error"])
        return text if not field or text.startswith(field.split(".")[0] + ".") else f"{field}: {text}"
    if kind == "union_tag_invalid":
        return f"{field}.name: got {first['ctx']['tag']!r}, wanted one of {first['ctx']['expected_tags']}"
    return f"{field}: got {first['input']!r}; {first['msg'][0].lower()}{first['msg'][1:]}"


_KINDS = {"adamw", "adam", "sgd", "constant", "linear", "cosine", "step", "float", "literal['auto']", "constrained-float"}


def _keys_at(path: list[str], location: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the section at `path`, for the kind that `location` chose."""
    model: type[pydantic.BaseModel] = Spec
    kind = next((str(part) for part in location if part in _OPTIMIZERS or part in _SCHEDULES), None)
    for part in path:
        if part == "optimizer" and kind in _OPTIMIZERS:
            model = _OPTIMIZERS[kind]
        elif part == "schedule" and kind in _SCHEDULES:
            model = _SCHEDULES[kind]
        else:
            field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
            annotation = field.annotation if field else None
            options = [annotation, *getattr(annotation, "__args__", ())]
            model = next((o for o in options if isinstance(o, type) and issubclass(o, pydantic.BaseModel)), model)
    return [field.alias or name for name, field in model.model_fields.items()]


_OPTIMIZERS: dict[str, type[pydantic.BaseModel]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD}
_SCHEDULES: dict[str, type[pydantic.BaseModel]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "step": StepDecay,
}
