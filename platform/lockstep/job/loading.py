"""Loading a job by the name that a spec gives it."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pydantic
import pydantic_core
import torch.distributed as dist

from lockstep.errors import first_line, nearest
from lockstep.job import problems
from lockstep.job.frames import place_in_job
from lockstep.job.inputs.imports import Asked, imports_noted, note_imports
from lockstep.job.inputs.system_calls import watch_calls, watch_modules
from lockstep.job.inputs.variables import RANK, Reads, keep_reads, variables_noted, watch
from lockstep.job.interface import IS_PLACEMENT, Job, Params
from lockstep.job.job_folder import not_imported
from lockstep.job.methods import check_methods
from lockstep.job.source import class_of, import_from_source, note_files
from lockstep.job.typed_tree import Opaque, decoded, encoded, text
from lockstep.randomness import code_key, seed_all
from lockstep.spec.messages import refusal
from lockstep.threads import one_library_thread, one_thread


@contextmanager
def others_out_of_sight() -> Iterator[None]:
    """Keep the other workers from the job's code: no initialised process group, and no rank in the environment.

    A metric that gathers over the default group, as torchmetrics' do, would give other values on another number of
    workers, or wait for ever where ranks call it unequally often; a rate that is multiplied by WORLD_SIZE would be another
    one. Lockstep itself talks on the channel of its Group.
    """
    default, dist.group.WORLD = dist.group.WORLD, None
    saved = {name: os.environ.pop(name) for name in RANK if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)
        dist.group.WORLD = default


def load_job(use: str, params: Mapping[str, Any]) -> Job:
    """The job that `use` names, such as `"jobs.digits.job:Digits"`, built with `params`.

    The generators are seeded alike before its module is imported and before it is made, and both have one thread: a fixed target that its
    `__init__` draws, or a basis that it computes, is the same in every process. Raises JobImportError where the name leads nowhere and SpecError where the params do
    not fit.
    """
    reads = Reads()
    with others_out_of_sight(), one_library_thread(), one_thread(), variables_noted(reads):
        job = _build_job(use, params)
    keep_reads(job, reads)
    return job


def _build_job(use: str, params: Mapping[str, Any]) -> Job:
    job_class = _job_class(use)
    check_methods(job_class, use)
    checked = _checked(job_class, params)
    _refuse_drawn(job_class, checked, params)
    seed_all(code_key("job", use))
    asked = Asked()
    try:
        with imports_noted(asked):
            job = job_class(checked)
    except (Exception, SystemExit) as error:  # __init__ is the job's own code
        raise problems.NOT_MADE(use=use, where=place_in_job(error), got=first_line(error)) from error
    note_imports(job, asked)
    return job


def check_params(use: str, params: Mapping[str, Any]) -> None:
    """SpecError where `params` do not fit the job that `use` names, JobImportError where that leads nowhere."""
    _checked(_job_class(use), params)


def _checked(job_class: type[Job], params: Mapping[str, Any]) -> Params:
    try:
        return job_class.Params.model_validate(dict(params))
    except pydantic.ValidationError as error:
        raise refusal(error, job_class.Params, params, within="job.params") from error


def placement_params(use: str) -> frozenset[str]:
    """The names of the job's params that are placement, as a spec writes them. Raises JobImportError."""
    return _placed(_job_class(use))


def _placed(job_class: type[Job]) -> frozenset[str]:
    fields = job_class.Params.model_fields.items()
    return frozenset(
        field.alias or name
        for name, field in fields
        if any(marker is IS_PLACEMENT for marker in field.metadata)
    )


def deciding_params(use: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The trees of the params that decide about bits, by the names that a spec writes: as the job gets them, with their defaults.

    Raises SpecError where `params` do not fit the job, JobImportError where `use` leads nowhere.
    """
    job_class = _job_class(use)
    return _trees(job_class, _checked(job_class, params), params)


def _trees(job_class: type[Job], checked: Params, params: Mapping[str, Any]) -> dict[str, Any]:
    fields, placed = job_class.Params.model_fields.items(), _placed(job_class)
    values = {field.alias or name: getattr(checked, name) for name, field in fields}
    trees = {name: _tree(value, params.get(name)) for name, value in values.items() if name not in placed}
    if extra := checked.model_extra:  # of a job that takes any, and sees in which order they are
        trees |= {name: _tree(value, params.get(name)) for name, value in extra.items()}
        trees[""] = list(extra)
    return trees


def _refuse_drawn(job_class: type[Job], checked: Params, params: Mapping[str, Any]) -> None:
    """SpecError where a param has another value each time: the identity would have another one than the job, and no resume would have it again."""
    again = _trees(job_class, _checked(job_class, params), params)
    for name, tree in _trees(job_class, checked, params).items():
        if text(tree) != text(again[name]):
            raise problems.PARAM_DRAWN(name=name, got=decoded(tree), again=decoded(again[name]))


def _tree(value: Any, written: Any) -> Any:
    """The tree of a param. One that has no plain form, or is secret, is told as it was written, or by its type."""
    try:
        return encoded(value, _opaque)
    except (pydantic_core.PydanticSerializationError, ValueError):
        return {"$written": [f"{type(value).__module__}.{type(value).__qualname__}", encoded(written)]}


_BUILT_IN: tuple[Any, ...] = (int, float, str, bytes, list, tuple, dict, set, frozenset)


def _opaque(value: Any) -> Opaque:
    """A value of a kind of its own: a model by its fields, anything else in the plain form that pydantic gives it.

    ValueError or pydantic's error for one that has none.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, pydantic.SecretStr | pydantic.SecretBytes):
        raise ValueError(f"a {kind} is not shown")
    if isinstance(value, pydantic.BaseModel):
        return Opaque(kind, {**dict(value), **(value.model_extra or {})})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return Opaque(kind, {field.name: getattr(value, field.name) for field in fields})
    for built_in in _BUILT_IN if not isinstance(value, enum.Enum) else ():
        if isinstance(value, built_in):  # of a class that derives from it
            return Opaque(kind, built_in(value))
    return Opaque(kind, pydantic_core.to_jsonable_python(value, fallback=_by_name))


def _by_name(value: Any) -> str:
    """A function by its name; it is source code, which the identity has. ValueError for other objects."""
    if not hasattr(value, "__qualname__"):
        raise ValueError(f"{type(value).__name__} has no plain form")
    return f"{value.__module__}.{value.__qualname__}"


def _job_class(use: str) -> type[Job]:
    module_name, class_name = class_of(use)
    module = import_job(module_name)
    candidate = getattr(module, class_name, None)
    if candidate is None:
        if (file := not_imported(module)) is not None:
            whose = "Python's own" if module_name in sys.stdlib_module_names else "another"
            raise problems.OTHER_MODULE(module=module_name, got=class_name, whose=whose, file=file)
        classes = [name for name, value in vars(module).items() if _is_job(value) and value is not Job]
        hint = nearest(class_name, classes) or "; it holds no subclass of lockstep.Job"
        raise problems.NO_CLASS(module=module_name, got=class_name, hint=hint)
    if not _is_job(candidate):
        raise problems.NO_JOB(got=use)
    job_class: type[Job] = candidate
    if not (isinstance(job_class.Params, type) and issubclass(job_class.Params, Params)):
        raise problems.NO_PARAMS(got=use)
    return job_class


def _is_job(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Job)


def import_job(name: str) -> ModuleType:
    """The job's module, imported with the generators seeded and with one thread, for it may draw and compute. Raises JobImportError."""
    seed_all(code_key("import", name))
    watch()
    watch_calls()
    watch_modules()
    import_from_source()
    try:
        note_files(name)
        if name in sys.modules:
            return importlib.import_module(name)
        with one_library_thread(), one_thread():
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # an import may raise anything, and a script exits
        raise problems.IMPORT_FAILED(what=name, got=_brief(error), folder=sys.path[0] or ".") from error


def _brief(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError in {error.filename}, line {error.lineno}: {error.msg}"
    return first_line(error)
