"""How a call executes a run: where, and what it shows. Nothing here changes a bit of the run.

The command line and the calls from Python have these options from here: a new one is a field of RunOptions, which says which commands
take it and how, and a line of CallOptions. What acts on it reads the field.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from lockstep.driver.progress import Progress, Silent
from lockstep.driver.start_stages import StageEnds
from lockstep.record.events.union import Alerted


@dataclass(frozen=True, slots=True)
class Declared:
    """How a command takes an option."""

    help: str
    commands: tuple[str, ...]
    """The commands that take it."""
    metavar: str | None = None
    least: int | None = None
    variable: str | None = None
    """The environment variable that has its value where the command line has none."""


def _option(commands: str, default: Any, text: str, **more: Any) -> Any:
    """A field that these commands take as an option."""
    return field(default=default, metadata={"declared": Declared(text, tuple(commands.split()), **more)})


def _nobody(alert: Alerted) -> None:
    """The callback of calls that have nobody to tell of an alert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options that train, resume and sweep have in common."""

    progress: Progress = field(default_factory=Silent)
    local: bool = _option(
        "train resume verify promote", False, "train in this process, without Ray; works under torchrun"
    )
    """Train in this process without Ray, or as one rank under torchrun."""
    address: str | None = _option(
        "train resume sweep verify promote", None, "Ray cluster: an address, auto or local"
    )
    """The Ray cluster, as `cluster_address` reads it."""
    verbose: bool = False
    """Show what Ray itself logs."""
    chaos: str | None = _option(
        "train resume",
        None,
        'kill parts of the run on purpose; probabilities per step: "worker:0.02,node:0.005"',
    )
    """Parts of the run that are killed on purpose, such as `worker:0.02`."""
    retries: int = _option(
        "train resume",
        0,
        "in a cluster job: how often to start the run again if its driver, or the driver's node, is lost",
        least=0,
    )
    """How often the run is started again if its driver is lost."""
    notify: str | Sequence[str] | None = _option(
        "train resume sweep",
        None,
        "shell command to run at the run's start, failure and end; default: LOCKSTEP_NOTIFY",
        metavar="COMMAND",
        variable="LOCKSTEP_NOTIFY",
    )
    """A command, a list of words or a text for the shell, that is run at the run's start, failure and end."""
    webhook: str | None = _option(
        "train resume sweep",
        None,
        "http(s) address that gets the same as JSON in a POST; default: LOCKSTEP_WEBHOOK",
        metavar="URL",
        variable="LOCKSTEP_WEBHOOK",
    )
    """An address that gets what the command of `notify` is told, as JSON."""
    on_alert: Callable[[Alerted], None] = _nobody
    """Called with each alert of the spec that fires, once."""
    source: Mapping[str, bytes] | None = None
    """The job's files by their paths below a source root, if they are in no folder: those of a class of `__main__`."""
    began_at: float = field(default_factory=time.time)
    """When the command was given, Unix time in seconds."""
    start: StageEnds = field(default_factory=StageEnds, compare=False)
    """When the stages of the start ended, until the first step of the call."""


class HeardAlerts:
    """Tells each alert once: a recorder that took another's place has some of them again."""

    def __init__(self, options: RunOptions) -> None:
        self._options, self._heard = options, set[str]()

    def hear(self, alerts: Sequence[Alerted]) -> None:
        """Tell those of the alerts that are new."""
        for alert in alerts:
            if alert.rule not in self._heard:
                self._heard.add(alert.rule)
                self._options.progress.say(str(alert))
                self._options.on_alert(alert)


class SweepCallOptions(TypedDict, total=False):
    """What `lockstep.sweep` takes by name; each is the field of RunOptions, and left out as None."""

    progress: Progress | None
    address: str | None
    verbose: bool
    notify: str | Sequence[str] | None
    webhook: str | None
    began_at: float | None


class CallOptions(SweepCallOptions, total=False):
    """What `lockstep.train` and `lockstep.resume` take by name."""

    local: bool
    chaos: str | None


def options_of_call(
    source: Mapping[str, bytes] | None = None,
    kind: type[SweepCallOptions] = CallOptions,
    **options: Unpack[CallOptions],
) -> RunOptions:
    """The options of a call from Python; in a notebook its progress is shown below the cell. TypeError for one that is not declared in `kind`."""
    known = kind.__annotations__
    if unknown := sorted(options.keys() - known.keys()):
        raise TypeError(f"there is no option {unknown[0]!r}; there are {', '.join(known)}")
    from lockstep.driver.notebook import default_progress

    set_options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return RunOptions(**{"progress": default_progress(), "source": source or None, **set_options})


def taken_by(command: str) -> tuple[str, ...]:
    """The names of the options that a command takes."""
    declarations = {entry.name: entry.metadata.get("declared") for entry in dataclasses.fields(RunOptions)}
    return tuple(
        name for name, declaration in declarations.items() if declaration and command in declaration.commands
    )


def declared(name: str) -> Declared:
    """How commands take the option of this name."""
    (option,) = (entry for entry in dataclasses.fields(RunOptions) if entry.name == name)
    declaration: Declared = option.metadata["declared"]
    return declaration
