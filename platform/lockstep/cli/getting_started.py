"""The commands of the first minutes, and of a bug report: `init`, `schema` and `doctor`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli.command_output import Address, Json, Overrides, Uri, Verbose, answered
from lockstep.cli.commands import command
from lockstep.job.job_folder import search_job_folder


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    command(app, "train", "lockstep init mine", "lockstep init mine --kind gpt")(init)
    command(app, "maintain", "lockstep schema > spec.schema.json")(schema)
    command(app, "maintain", "lockstep doctor", "lockstep doctor jobs/digits/train.yaml --json")(doctor)


def init(
    folder: Annotated[str, typer.Argument(metavar="NAME", help="the folder to make; its name is the run's")],
    kind: Annotated[str, typer.Option(help="the job to start from: classifier or gpt")] = "classifier",
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a small job that trains as it is. Its comments say what to change."""
    with answered(json_, verbose) as answer:
        from lockstep.calls.starter import init as written

        files = [str(path) for path in written(folder, kind)]
        lines = [
            f"written   {folder}: {', '.join(Path(file).name for file in files)}",
            f"train it  cd {shlex.quote(folder)} && lockstep train train.yaml --local",
        ]
        answer({"folder": str(Path(folder).absolute()), "files": files}, lambda: "\n".join(lines))


def schema(
    sweep: Annotated[bool, typer.Option("--sweep", help="the schema of sweep files instead")] = False,
    verbose: Verbose = False,
) -> None:
    """Print the JSON schema of spec files, for editors. They complete and check specs by it."""
    with answered(as_json=False, verbose=verbose) as answer:
        from lockstep.spec.schema import spec_schema, sweep_schema

        document = sweep_schema() if sweep else spec_schema()
        answer(document, lambda: json.dumps(document, indent=2))


def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC]", help="a spec to load, with its job")
    ] = None,
    overrides: Overrides = None,
    address: Address = None,
    uri: Uri = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print what a bug report needs, and warn of known problems. Changes nothing."""
    with answered(json_, verbose) as answer:
        search_job_folder(first=True)
        from lockstep.calls.doctor import diagnose

        report = diagnose(spec, overrides or [], address=address, uri=uri)
        answer(report, lambda: "\n".join(_report_lines(report)))


def _report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A line for each fact, warnings last."""
    versions = report["versions"]
    yield _line("versions", ", ".join(f"{name} {number}" for name, number in versions.items()))
    yield _line("python", report["python"])
    for section, shown in _SHOWN.items():
        facts = report[section]
        if facts is not None:
            yield _line(section, facts["error"] if "error" in facts else shown(facts))
    for name, value in report["variables"].items():
        yield _line("variable", f"{name}={value}")
    for warning in report["warnings"]:
        yield _line("WARNING", warning)


def _line(name: str, text: str) -> str:
    return f"{name:<10}  {text}"


def _machine(facts: Mapping[str, Any]) -> str:
    shared = facts["shared_memory_bytes"]
    return (
        f"{facts['platform']}; {facts['cpu'] or 'processor not known'} ({facts['usable_cores']} of "
        f"{facts['logical_cores']} logical cores; {' '.join(facts['instruction_sets']) or facts['machine']}); "
        f"{_gib(facts['available_bytes'])} of {_gib(facts['memory_bytes'])} memory free; "
        f"/dev/shm {'not there' if shared is None else _gib(shared)}; {facts['open_files']} open files"
    )


def _gpus(facts: Mapping[str, Any]) -> str:
    if facts["driver"] is None:
        return str(facts["why"])
    devices = (f"{device['name']} of {_gib(device['memory_bytes'])}" for device in facts["devices"])
    return f"driver {facts['driver']}: {', '.join(devices) or 'no device'}"


def _source(facts: Mapping[str, Any]) -> str:
    if facts["commit"] is None:
        return f"{facts['path']}, no git repository"
    return f"{facts['path']}, commit {facts['commit']}{' with changes' if facts['dirty'] else ''}"


def _runs(facts: Mapping[str, Any]) -> str:
    access = "can be written" if facts["writable"] else "cannot be written"
    because = f" ({facts['evidence']})" if facts["evidence"] else ""
    return f"{facts['path']} {access}{because}; {_gib(facts['free_bytes'])} free"


def _spec(facts: Mapping[str, Any]) -> str:
    if not facts["loads"]:
        return f"{facts['file']} does not load: {facts['problem']}"
    imports = "its job can be made" if facts["imports"] else f"its job cannot: {facts['import_problem']}"
    return f"{facts['file']} loads; {imports}"


def _evidence(facts: Mapping[str, Any]) -> str:
    return str(facts["evidence"])


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


_SHOWN = {
    "machine": _machine,
    "gpus": _gpus,
    "lockstep": _source,
    "folder": _source,
    "cluster": _evidence,
    "store": _evidence,
    "runs": _runs,
    "spec": _spec,
}
