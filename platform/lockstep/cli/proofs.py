"""Commands that check what is recorded: `verify`, `diff`, `replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.answers import Address, Json, Uri, Verbose, answered, began, running

if TYPE_CHECKING:
    from lockstep.calls.inspection import Inspected
    from lockstep.proof.difference import Difference
    from lockstep.proof.verification import Verified

RunId = Annotated[str, typer.Argument(metavar="RUN", help="the id of a run")]
Storage = Annotated[Path, typer.Option(help="folder that contains the run folders")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(verify)
    app.command()(diff)
    app.command()(replay)


def verify(
    run: RunId,
    from_: Annotated[
        int | None, typer.Option("--from", min=1, metavar="N", help="first step to compare")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="how many steps; default: 20, the run's last ones")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="all steps, from the beginning")] = False,
    sample: Annotated[
        float | None,
        typer.Option(metavar="P", help="a random share of the steps, 0 to 1, between checkpoints"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="W", help="how many workers; default: as the run's spec says")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="in this process, without Ray")] = False,
    address: Address = None,
    uri: Uri = None,
    storage: Storage = Path("runs"),
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Take steps of a recorded run again, and compare every bit with its record."""
    began_at = began()
    with answered(json_, verbose) as answer:
        from lockstep.calls.verification import verify as verify_run

        with running(json_, began_at, local, address, verbose, None) as options:
            found = verify_run(
                run,
                from_step=from_,
                steps=steps,
                all_steps=all_,
                share=sample,
                workers=workers,
                uri=uri,
                storage=storage,
                options=options,
            )
        answer(found.as_dict(), lambda: as_text(found))
    if not found.same:
        raise typer.Exit(1)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="the id of a run, or a spec file")],
    b: Annotated[str, typer.Argument(metavar="B", help="the same of the other")],
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="how many steps of a spec file are trained; default: 20"),
    ] = None,
    uri: Uri = None,
    storage: Storage = Path("runs"),
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare two runs: what differs by intention, then the first step, micro-batch, module and operator in which they part."""
    began_at = began()
    with answered(json_, verbose) as answer:
        from lockstep.calls.difference import diff as diff_runs

        with running(json_, began_at, True, None, verbose, None) as options:
            found = diff_runs(a, b, steps=steps, uri=uri, storage=storage, options=options)
        answer(found.as_dict(), lambda: difference_as_text(found))
    if not found.same:
        raise typer.Exit(1)


def replay(
    run: RunId,
    step: Annotated[int, typer.Option(min=1, metavar="N", help="the step, counted from 1")],
    micro_batch: Annotated[
        int | None,
        typer.Option(min=0, metavar="M", help="one micro-batch, whose samples and batch are written out"),
    ] = None,
    inspect: Annotated[
        bool,
        typer.Option(
            "--inspect", help="statistics of every module and gradient; autograd's anomaly detection"
        ),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="write a trace that Chrome and Perfetto open")
    ] = False,
    pdb: Annotated[bool, typer.Option("--pdb", help="a debugger before each micro-batch")] = False,
    out: Annotated[
        Path | None, typer.Option(help="folder for what is written; default: replay-<run>-step-<N>")
    ] = None,
    uri: Uri = None,
    storage: Storage = Path("runs"),
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Take one step of a recorded run again, to look into it."""
    began_at = began()
    with answered(json_, verbose) as answer:
        from lockstep.calls.inspection import replay as replay_step

        with running(json_ or pdb, began_at, True, None, verbose, None) as options:
            found = replay_step(
                run,
                step,
                micro_batch=micro_batch,
                inspect=inspect,
                profile=profile,
                debug=pdb,
                uri=uri,
                storage=storage,
                folder=out,
                options=options,
            )
        answer(found.as_dict(), lambda: inspected_as_text(found))
    if found.difference:
        raise typer.Exit(1)


def inspected_as_text(found: Inspected) -> str:
    """What a step came to, for a person."""
    lines = [f"step {found.step}: loss {found.loss!r}, gradient norm {found.grad_norm!r}"]
    lines.append(f"different: {found.difference}" if found.difference else "same: its row is as recorded")
    for one in found.micro_batches:
        ids = ", ".join(map(str, one["samples"][:8])) + (", …" if len(one["samples"]) > 8 else "")
        lines.append(f"micro-batch {one['micro_batch']}: total loss {one['loss']!r}, samples {ids}")
        for seen in [*one.get("modules", ()), *one.get("gradients", ())]:
            values = "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in seen.items()
                if name != "what"
            )
            lines.append(f"  {seen['what']:40} {values}")
    return "\n".join([*lines, *(f"written           {path}" for path in found.files)])


def difference_as_text(found: Difference) -> str:
    """How two runs differ, for a person."""
    lines = [f"{one.field}: {one.recorded!r} → {one.found!r}" for one in found.fields]
    lines += found.source.splitlines()
    if found.first_difference is None:
        return "\n".join([*lines, f"same: every bit of {found.steps} steps is equal"])
    parted = found.first_difference.as_dict()
    where = f"step {parted['step']}"
    if parted["micro_batch"] is not None:
        where += f", micro-batch {parted['micro_batch']}"
    lines.append(f"different: {where}: {parted['quantity']}: {parted['recorded']} → {parted['found']}")
    lines += [f"{name:18}{parted[name]}" for name in ("module", "parameter", "operator") if parted[name]]
    lines += [
        f"{name:18}" + "  ".join(f"{key} {value}" for key, value in (values or {}).items())
        for name, values in parted["statistics"].items()
    ]
    return "\n".join([*lines, *([found.note] if found.note else [])])


def as_text(found: Verified) -> str:
    """What a verification came to, for a person."""
    taken = ", ".join(f"{one.start + 1} to {one.until}" for one in found.stretches)
    within = "" if found.tolerance is None else f" within {found.tolerance:g}"
    lines = []
    if found.first_difference is None:
        said = "every bit is equal" if found.same_bits else f"not the same bits, and equal{within}"
        lines.append(f"same: {found.steps} steps of run {found.run_id} ({taken}): {said}")
    else:
        step, micro_batch, quantity, recorded, other = found.first_difference.as_dict().values()
        where = f"step {step}" + ("" if micro_batch is None else f", micro-batch {micro_batch}")
        lines.append(f"different: {where}: {quantity} is recorded as {recorded} and was found as {other}")
        lines.append(f"cause             {found.cause}")
        lines.append(f"taken again       steps {taken} of run {found.run_id}")
        if within:
            lines.append(f"compared          {within.strip()}, relative to the recorded number")
    if found.elsewhere:
        lines.append(f"bits may differ   {'; '.join(found.elsewhere)}")
    return "\n".join(lines)
