"""How a command is declared: its group in `lockstep --help`, its examples, and the options of a run that it takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer.core import TyperGroup

from lockstep.driver.options import RunOptions, declared, taken_by

Group = Literal["train", "look", "prove", "serve", "maintain"]

GROUPS: Mapping[Group, str] = {
    "train": "Train, and look ahead",
    "look": "Look at runs",
    "prove": "Prove what a run or a change did",
    "serve": "Serve a trained model",
    "maintain": "Maintain runs, clusters and this installation",
}
"""The groups in the order in which they are shown."""

OptionValues = Mapping[str, Any]
"""Options of RunOptions as a command got them, by name."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., None])


class Groups(TyperGroup):
    """A command of commands, which lists them by group, where they have one, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        for group, title in [*GROUPS.items(), (None, "Commands")]:
            rows = [
                (name, command.get_short_help_str(limit=1000).rstrip("."))
                for name, command in commands
                if command is not None and _group_of(command) == group
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _group_of(command: Any) -> Group | None:
    panel = command.rich_help_panel
    return panel if isinstance(panel, str) and panel in GROUPS else None  # type: ignore[return-value]


def command(
    app: typer.Typer, group: Group | None, *examples: str, name: str | None = None
) -> Callable[[FunctionT], FunctionT]:
    """Add a function as a command. It gets the options of RunOptions that such a command takes as its argument `option_values`.

    `group` is None where `app` is itself a command, such as `lockstep record`.
    """

    def add(function: FunctionT) -> FunctionT:
        options = taken_by(name or function.__name__)
        text = "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)
        app.command(name, rich_help_panel=group, epilog=text if examples else None)(
            _taking(function, options) if options else function
        )
        return function

    return add


def _taking(function: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
    """A function whose argument `option_values` is an option for each of these names."""
    hints = get_type_hints(RunOptions)
    defaults = RunOptions()
    of_options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(defaults, name),
            annotation=Annotated[_type_of(name, hints[name]), _option(name)],
        )
        for name in names
    ]
    of_function = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "option_values":
            parameters += of_options
        else:
            annotation = of_function[parameter.name]
            parameters.append(parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def call(**arguments: Any) -> None:
        option_values = {name: arguments.pop(name) for name in names}
        function(**arguments, option_values=option_values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del call.__wrapped__  # by which its annotations would be read
    return call


def _type_of(name: str, hint: Any) -> Any:
    """The type that the command line can give: a command of a notification is a text there."""
    return str | None if name == "notify" else hint


def _option(name: str) -> Any:
    """An option of RunOptions for typer."""
    declaration = declared(name)
    return typer.Option(
        f"--{name}",
        help=declaration.help,
        metavar=declaration.metavar,
        min=declaration.least,
        envvar=declaration.variable,
        show_envvar=False,
    )
