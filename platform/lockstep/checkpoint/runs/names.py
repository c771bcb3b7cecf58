"""Names of runs, kept beside their checkpoints: `<storage>/named-<name>/run_id`.

A retrying system, such as Kubernetes or a queue, cannot know the run id that the first try was given. It knows a name.
"""

from __future__ import annotations

from lockstep.checkpoint import problems
from lockstep.checkpoint.errors import LostFileError, TakenError
from lockstep.checkpoint.layout import is_run_id
from lockstep.checkpoint.storage.interface import Storage
from lockstep.paths import shown


def run_of_name(storage: Storage, name: str) -> str | None:
    """The id of the run that has this name."""
    try:
        owner = storage.read(_file(name)).decode(errors="replace")
    except LostFileError:
        return None
    if not is_run_id(owner):
        raise problems.NAME_FILE(
            name=name, got=shown(owner), file=f"{storage.shown.rstrip('/')}/{_file(name)}"
        )
    return owner


def give_name(storage: Storage, name: str, run_id: str) -> None:
    """Give a run its name. SpecError where another run was given it meanwhile."""
    try:
        storage.create(_file(name), run_id.encode())
    except TakenError as error:
        owner = run_of_name(storage, name)
        if owner == run_id:
            return  # given before, by one whose answer was lost
        raise problems.NAME_TAKEN(name=name, owner=owner) from error


def folder_of(name: str) -> str:
    """The folder that a command holds while it begins a run of this name."""
    return f"named-{name}"


def _file(name: str) -> str:
    return f"{folder_of(name)}/run_id"
