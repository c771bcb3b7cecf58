"""Promotion of a checkpoint in MLflow's model registry: a version of a registered model, and an alias that points to it.

The alias is the commit: it moves last, in one call. Whatever fails before or in it, what the promotion has made is taken back, and the alias
points to where it did. A process that is killed leaves at most a version without the alias, which has the tag PENDING; the next promotion of
the same checkpoint uses it. Several at once may use one version: the tag names the last of them, and only that one takes the version back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import first_line
from lockstep.record import problems
from lockstep.record.mirror.checkpoint_copies import checkpoint_tags
from lockstep.record.mirror.mlflow.client import connecting, translated
from lockstep.record.mirror.mlflow.models import Models

PENDING = "lockstep.promotion"


class Registered(NamedTuple):
    """A version of a registered model, with the alias that points to it; `previous` is the version that it pointed to before."""

    name: str
    alias: str
    version: str
    model_id: str
    previous: str | None


def promote(
    uri: str,
    run_id: str,
    step: int,
    checkpoint: str,
    folder: Path | None,
    *,
    name: str,
    alias: str,
    tags: Mapping[str, str],
    check: Callable[[], None] = lambda: None,
) -> Registered:
    """Register the checkpoint of a run's step, which is at the URI `checkpoint`, as a version of `name`, and have `alias` point to it.

    Its files are those of `folder`, or those that the store has of it already; without either the version refers to where the checkpoint is. `check`
    raises unless they are what they have to be. RecordError where the store refuses or does not answer. After an error the registry is as before, or it
    says what could not be taken back.
    """
    with connecting(uri) as (client, _):
        pass  # from here on other processes may open the store, too
    # MLflow's registry looks for the model behind a version in the store that is named globally.
    with translated(uri, again=False), _named_globally(uri):
        models = Models(client, client.get_run(run_id).info.experiment_id, run_id)
        with _taken_back_on_failure(name, alias) as undo:
            model_id = _published(client, models, run_id, step, checkpoint, folder, undo)
            check()
            _register(client, name, undo)
            pending = f"not complete: {alias} {uuid.uuid4().hex}"
            version = _version(client, name, model_id, run_id, {**tags, PENDING: pending}, undo)
            previous = _alias(client, name, alias)
            if previous != version:
                undo.callback(_put_back, client, name, alias, previous, version, pending)
                client.set_registered_model_alias(name, alias, version)
        # What is left of the tag by a failure here says less than the alias.
        client.delete_model_version_tag(name, version, PENDING)
    return Registered(name, alias, version, model_id, previous)


@contextmanager
def _named_globally(uri: str) -> Iterator[None]:
    import mlflow

    earlier = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(earlier)  # None where nobody had named one


@contextmanager
def _taken_back_on_failure(name: str, alias: str) -> Iterator[ExitStack]:
    """A stack of what takes each step back, which is called where the block fails, an interrupt included."""
    with ExitStack() as undo:
        try:
            yield undo
        except BaseException as error:
            try:
                undo.close()
            except Exception as further:  # noqa: BLE001 - whatever it is, what is left has to be told
                raise problems.HALF_PROMOTED(
                    got=first_line(error), further=first_line(further), name=name, alias=alias
                ) from error
            raise
        undo.pop_all()


def _published(
    client: Any, models: Models, run_id: str, step: int, checkpoint: str, folder: Path | None, undo: ExitStack
) -> str:
    """The id of the checkpoint's model, which has the files of `folder`."""

    def unless_registered(take_back: Callable[..., object], *arguments: object) -> None:
        """Another promotion may have made a version of the model meanwhile."""
        sources = {f"models:/{model.model_id}" for model in models.ready_models() if model.name == name}
        versions = client.search_model_versions(f"run_id = '{run_id}'")
        if not any(version.source in sources for version in versions):
            take_back(*arguments)

    name, tags = f"checkpoint-{step}", checkpoint_tags(checkpoint)
    existing = [model for model in models.ready_models() if model.name == name]
    if not existing:
        undo.callback(unless_registered, models.delete, name)
    elif folder is not None and not any(map(models.has_files, existing)):
        undo.callback(unless_registered, models.publish_reference, name, step, tags)
    return models.publish(name, step, tags, folder)


def _register(client: Any, name: str, undo: ExitStack) -> None:
    if not client.search_registered_models(filter_string=f"name = '{name}'"):
        undo.callback(_delete_empty, client, name)
        client.create_registered_model(name)


def _delete_empty(client: Any, name: str) -> None:
    """Delete a registered model that this promotion has made, unless another one has added a version meanwhile."""
    if client.search_registered_models(filter_string=f"name = '{name}'") and not _versions(client, name):
        client.delete_registered_model(name)


def _version(
    client: Any, name: str, model_id: str, run_id: str, tags: Mapping[str, str], undo: ExitStack
) -> str:
    """The version of a registered model that is this model; one from before gets the tags."""
    for known in _versions(client, name, f" and run_id = '{run_id}'"):
        if known.source == f"models:/{model_id}":
            for tag, value in tags.items():
                client.set_model_version_tag(name, known.version, tag, value)
            return str(known.version)

    def delete_created() -> None:  # whatever became of the answer
        for listed in _versions(client, name, f" and run_id = '{run_id}'"):
            # A search does not return aliases.
            created = client.get_model_version(name, listed.version)
            if created.tags.get(PENDING) == tags[PENDING] and not created.aliases:
                client.delete_model_version(name, created.version)

    undo.callback(delete_created)
    created = client.create_model_version(
        name, f"models:/{model_id}", run_id=run_id, tags=dict(tags), model_id=model_id, await_creation_for=0
    )
    return str(created.version)


def _versions(client: Any, name: str, further: str = "") -> list[Any]:
    return list(client.search_model_versions(f"name = '{name}'{further}"))


def _alias(client: Any, name: str, alias: str) -> str | None:
    """The version that an alias points to."""
    version = client.get_registered_model(name).aliases.get(alias)
    return None if version is None else str(version)


def _put_back(client: Any, name: str, alias: str, previous: str | None, version: str, pending: str) -> None:
    """Have the alias point to `previous`, unless another promotion has moved it, or uses the version."""
    if _alias(client, name, alias) != version:
        return
    if client.get_model_version(name, version).tags.get(PENDING) != pending:
        return
    if previous is not None:
        client.set_registered_model_alias(name, alias, previous)
    else:
        client.delete_registered_model_alias(name, alias)
