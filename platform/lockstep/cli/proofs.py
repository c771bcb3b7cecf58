"""Commands that check what is recorded, or what a change of the code does: `verify`, `diff`, `guard`, `replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import problems
from lockstep.cli.command_output import (
    RUNS,
    Json,
    Overrides,
    RunId,
    SpecFile,
    Storage,
    Uri,
    Verbose,
    answered,
    began,
    running,
)
from lockstep.cli.commands import OptionValues, command
from lockstep.exit_codes import ExitCode

if TYPE_CHECKING:
    from lockstep.calls.attestation import Attested, Checked
    from lockstep.calls.promotion import Promoted
    from lockstep.calls.replay_call import Inspected
    from lockstep.proof.guard import Guarded
    from lockstep.proof.run_diff import Difference, Parted
    from lockstep.proof.verification import Verified

Sandbox = Annotated[
    bool,
    typer.Option(
        "--sandbox/--no-sandbox",
        help="whether the run's code is confined: no network, nothing to write to; needs bubblewrap or user namespaces",
    ),
]
OptionalRunId = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="the id of a run; --statement names its own")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    command(
        app,
        "prove",
        "lockstep verify RUN",
        "lockstep verify RUN --all --workers 2",
        "lockstep verify --statement RUN.intoto.json --key signer.pem",
    )(verify)
    command(app, "prove", "lockstep diff RUN OTHER", "lockstep diff a.yaml b.yaml --steps 50")(diff)
    command(app, "prove", "lockstep guard jobs/digits/train.yaml --base HEAD~1")(guard)
    command(app, "prove", "lockstep replay RUN --step 412 --inspect")(replay)
    command(app, "prove", "lockstep attest RUN --key signer-private.pem")(attest)
    command(
        app,
        "serve",
        "lockstep promote RUN --best --as digits@champion",
        "lockstep promote RUN --step 275 --as digits@candidate --key signer-private.pem",
    )(promote)


def verify(
    run: OptionalRunId = None,
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
    seed: Annotated[
        int | None, typer.Option(min=0, help="seed for drawing the spans of --sample; default: random")
    ] = None,
    statement: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="check a statement of lockstep attest, and a share of its run"),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="PUB", help="public key (PEM) of the expected signer")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="W", help="how many workers; default: as the run's spec says")
    ] = None,
    sandbox: Annotated[
        bool | None,
        typer.Option(
            "--sandbox/--no-sandbox",
            help="whether the run's code is confined, in one process: no network, nothing to write to, no record; default: with --statement",
        ),
    ] = None,
    *,
    option_values: OptionValues,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Repeat steps of a run, and compare every bit with its record."""
    began_at = began()
    with answered(json_, verbose, unanswered=ExitCode.REFUSED) as answer:
        from lockstep.calls.verify import verify as verify_run

        if statement is not None:
            if from_ is not None or steps is not None or all_:
                raise problems.STATEMENT_SHARE()
            from lockstep.calls.attestation import check_statement

            sandbox = sandbox is not False
            option_values = _in_this_process(option_values, sandbox and workers is None)
            with running(json_, began_at=began_at, verbose=verbose, **option_values) as options:
                checked = check_statement(
                    statement,
                    key=key,
                    run_id=run,
                    share=sample,
                    seed=seed,
                    workers=workers,
                    uri=uri,
                    storage=storage,
                    options=options,
                    sandboxed=sandbox,
                )
            answer(checked.as_dict(), lambda: checked_as_text(checked))
            if not checked.same:
                raise typer.Exit(ExitCode.FAILED)
            return
        if run is None or key is not None:
            raise problems.NOTHING_TO_VERIFY()
        option_values = _in_this_process(option_values, sandbox is True and workers is None)
        with running(json_, began_at=began_at, verbose=verbose, **option_values) as options:
            result = verify_run(
                run,
                from_step=from_,
                steps=steps,
                all_steps=all_,
                share=sample,
                seed=seed,
                workers=workers,
                uri=uri,
                storage=storage,
                options=options,
                sandboxed=sandbox is True,
            )
        answer(result.as_dict(), lambda: as_text(result))
    if not result.same:
        raise typer.Exit(ExitCode.FAILED)


def _in_this_process(option_values: OptionValues, confined: bool) -> OptionValues:
    """The options, with a confined run in this process unless a cluster is named."""
    return {
        **option_values,
        "local": option_values["local"] or (confined and option_values["address"] is None),
    }


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="the id of a run, or a spec file")],
    b: Annotated[str, typer.Argument(metavar="B", help="the other run: an id or a spec file")],
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="how many steps of a spec file are trained; default: 20"),
    ] = None,
    sandbox: Sandbox = False,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare two runs, down to the first operator that differs. What differs by intention is told as well."""
    began_at = began()
    with answered(json_, verbose, unanswered=ExitCode.REFUSED) as answer:
        from lockstep.calls.diff import diff as diff_runs

        with running(json_, began_at=began_at, local=True, verbose=verbose) as options:
            result = diff_runs(
                a, b, steps=steps, uri=uri, storage=storage, options=options, sandboxed=sandbox
            )
        answer(result.as_dict(), lambda: difference_as_text(result))
    if not result.same:
        raise typer.Exit(ExitCode.FAILED)


def guard(
    spec: SpecFile,
    overrides: Overrides = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="REV", help="the commit to compare with; default: that of --bisect"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="how many steps are trained")] = 20,
    bisect: Annotated[
        str | None,
        typer.Option(metavar="GOOD", help="look for the first commit after this one that changes bits"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, metavar="W", help="how many processes train a side")] = 1,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check whether the working tree trains the same bits as a commit."""
    began_at = began()
    with answered(json_, verbose, unanswered=ExitCode.REFUSED) as answer:
        from lockstep.calls.guarding import guard as guard_bits

        against = base or bisect
        if against is None:
            raise problems.GUARD_BASE()
        with running(json_, began_at=began_at, local=True, verbose=verbose) as options:
            result = guard_bits(
                spec,
                against,
                overrides or [],
                steps=steps,
                bisect=bisect,
                workers=workers,
                options=options,
            )
        answer(result.as_dict(), lambda: guarded_as_text(result))
    if not result.same:
        raise typer.Exit(ExitCode.FAILED)


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
    sandbox: Sandbox = False,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Repeat one step of a recorded run, and inspect it."""
    began_at = began()
    with answered(json_, verbose, unanswered=ExitCode.REFUSED) as answer:
        from lockstep.calls.replay_call import replay as replay_step

        with running(json_ or pdb, began_at=began_at, local=True, verbose=verbose) as options:
            result = replay_step(
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
                sandboxed=sandbox,
            )
        answer(result.as_dict(), lambda: inspected_as_text(result))
    if result.difference:
        raise typer.Exit(ExitCode.FAILED)


def attest(
    run: RunId,
    key: Annotated[
        Path | None, typer.Option(metavar="PRIVATE", help="the private key, PEM, that signs the statement")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="the file that is written; default: <run>.intoto.json")
    ] = None,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a statement of what a finished run is. Its format is in-toto's; it is signed if a key is given."""
    with answered(json_, verbose, unanswered=ExitCode.REFUSED) as answer:
        from lockstep.calls.attestation import attest as attest_run

        result = attest_run(run, key=key, out=out, uri=uri, storage=storage)
        answer(result.as_dict(), lambda: attested_as_text(result))


def promote(
    run: RunId,
    as_: Annotated[
        str,
        typer.Option(
            "--as", metavar="NAME@ALIAS", help="the registered model, and the alias that is to point to it"
        ),
    ],
    best: Annotated[bool, typer.Option("--best", help="the best checkpoint by the run's own rule")] = False,
    step: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="the checkpoint of this step; default: the newest")
    ] = None,
    steps: Annotated[
        int,
        typer.Option(min=1, metavar="K", help="how many steps up to the checkpoint are repeated at least"),
    ] = 20,
    key: Annotated[
        Path | None, typer.Option(metavar="PRIVATE", help="the private key, PEM, that signs the statement")
    ] = None,
    *,
    option_values: OptionValues,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Verify a checkpoint, and register it in MLflow under a name."""
    began_at = began()
    with answered(json_, verbose) as answer:
        from lockstep.calls.promotion import promote as promote_checkpoint

        with running(json_, began_at=began_at, verbose=verbose, **option_values) as options:
            result = promote_checkpoint(
                run,
                as_,
                best=best,
                step=step,
                steps=steps,
                key=key,
                uri=uri,
                storage=storage,
                options=options,
            )
        answer(result.as_dict(), lambda: promoted_as_text(result))


def promoted_as_text(promoted: Promoted) -> str:
    """A checkpoint that was registered, for a person."""
    previous = (
        f" (before: version {promoted.previous})" if promoted.previous not in (None, promoted.version) else ""
    )
    return "\n".join(
        [
            f"promoted: run {promoted.run_id}, step {promoted.step}, is version {promoted.version} of {promoted.name}",
            f"alias             {promoted.name}@{promoted.alias}{previous}",
            f"verified          {promoted.verified}",
            f"attestation       {promoted.tags['lockstep.attestation']}",
        ]
    )


def attested_as_text(attested: Attested) -> str:
    """A statement that was written, for a person."""
    return "\n".join(
        [
            f"stated: run {attested.run_id}, {attested.steps} steps",
            f"ledger            {attested.chain}",
            f"signed by         {attested.signed_by or 'nobody (--key signs it)'}",
            f"written           {attested.path}",
        ]
    )


def checked_as_text(checked: Checked) -> str:
    """The result of checking a statement, for a person."""
    signature = {"good": "good", "bad": "bad", "none": "none", "not checked": "not checked (--key PUB does)"}
    by = "" if checked.signed_by is None else f", of key {checked.signed_by[:16]}…"
    lines = [f"signature         {signature[checked.signature]}{by}"]
    if checked.disagreement is not None:
        quantity, stated, actual = checked.disagreement
        lines.insert(0, f"different: {quantity} is stated as {stated} and was found as {actual}")
        lines += [f"seed              {checked.seed}"] * (checked.verified is not None)
    elif checked.verified is not None:
        lines = [
            as_text(checked.verified),
            *lines,
            "record            as stated",
            *_of_weights(checked.verified),
            f"seed              {checked.seed}",
        ]
    else:
        lines.insert(0, "different: the statement is not signed by this key, or was changed afterwards")
    return "\n".join(lines)


def _of_weights(verified: Verified) -> list[str]:
    """Whether the steps that were repeated lead to the stated weights, as lines."""
    if verified.weights:
        return ["weights           as stated: the last steps lead to them"]
    if verified.uncompared:
        return ["weights           not shown: not all of their files could be compared"] * verified.same
    return [
        "weights           not shown: the last steps were not taken again bit for bit (--sample 1 takes all)"
    ] * verified.same


def inspected_as_text(inspected: Inspected) -> str:
    """What a repeated step showed, for a person."""
    lines = [f"step {inspected.step}: loss {inspected.loss!r}, gradient norm {inspected.grad_norm!r}"]
    lines.append(
        f"different: {inspected.difference}" if inspected.difference else "same: its row is as recorded"
    )
    for micro_batch in inspected.micro_batches:
        ids = ", ".join(map(str, micro_batch["samples"][:8])) + (
            ", …" if len(micro_batch["samples"]) > 8 else ""
        )
        phase = f", phase {micro_batch['phase']}" if "phase" in micro_batch else ""
        lines.append(
            f"micro-batch {micro_batch['micro_batch']}{phase}: total loss {micro_batch['loss']!r}, samples {ids}"
        )
        for entry in [*micro_batch.get("modules", ()), *micro_batch.get("gradients", ())]:
            values = "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in entry.items()
                if name != "what"
            )
            lines.append(f"  {entry['what']:40} {values}")
    return "\n".join([*lines, *(f"written           {path}" for path in inspected.files)])


def difference_as_text(difference: Difference) -> str:
    """How two runs differ, for a person."""
    lines = [field.change for field in difference.fields]
    lines += difference.source.splitlines()
    if difference.first_difference is None:
        return "\n".join([*lines, f"same: every bit of {difference.steps} steps is equal"])
    return "\n".join(
        [*lines, *_parted(difference.first_difference), *([difference.note] if difference.note else [])]
    )


def guarded_as_text(guarded: Guarded) -> str:
    """What a guard found, for a person."""
    lines = [field.change for field in guarded.fields]
    base = guarded.base[:12]
    if guarded.first_difference is None:
        lines.append(f"same: every bit of {guarded.steps} steps is equal to those of commit {base}")
        return "\n".join(lines)
    lines += _parted(guarded.first_difference)
    lines.append(f"compared          commit {base} → the working tree")
    if guarded.commit is not None:
        lines.append(f"first changed by  commit {guarded.commit[:12]}: {guarded.title}")
    return "\n".join([*lines, *([guarded.note] if guarded.note else [])])


def _parted(first: Parted) -> list[str]:
    """Where two runs part first."""
    parted = first.as_dict()
    where = f"step {parted['step']}"
    if parted["micro_batch"] is not None:
        where += f", micro-batch {parted['micro_batch']}"
    lines = [f"different: {where}: {parted['quantity']}: {parted['recorded']} → {parted['found']}"]
    lines += [f"{name:18}{parted[name]}" for name in ("module", "parameter", "operator") if parted[name]]
    lines += [
        f"{name:18}" + "  ".join(f"{key} {value}" for key, value in (values or {}).items())
        for name, values in parted["statistics"].items()
    ]
    return lines


_MOST_FACTS = 4
"""So many facts that are not as recorded are told."""


def as_text(verified: Verified) -> str:
    """The result of a verification, for a person."""
    steps = ", ".join(f"{span.start + 1} to {span.until}" for span in verified.spans)
    within = "" if verified.tolerance is None else f" within {verified.tolerance:g}"
    lines = []
    if verified.first_difference is None:
        outcome = "every bit is equal" if verified.same_bits else f"not the same bits, and equal{within}"
        lines.append(f"same: {verified.steps} steps of run {verified.run_id} ({steps}): {outcome}")
    else:
        step, micro_batch, quantity, recorded, actual = verified.first_difference.as_dict().values()
        where = f"step {step}" + ("" if micro_batch is None else f", micro-batch {micro_batch}")
        lines.append(f"different: {where}: {quantity} is recorded as {recorded} and was found as {actual}")
        lines.append(f"cause             {verified.cause}")
        lines.append(f"taken again       steps {steps} of run {verified.run_id}")
        if within:
            lines.append(f"compared          {within.strip()}, relative to the recorded number")
    if not verified.ended:
        lines.append(
            "not finished      so there is no result, and the files beside its rows are not compared"
        )
    if verified.uncompared:
        lines.append(f"not compared      {verified.uncompared}")
    if verified.elsewhere:
        lines.append(f"bits may differ   {'; '.join(verified.elsewhere)}")
    if verified.fields is None:
        lines.append(
            "not known         whether versions, device, source and data are those of the run: it has no fields.json"
        )
    elif verified.same and (others := [str(field) for field in verified.fields if not field.elsewhere]):
        lines.append(f"not as recorded   {'; '.join(others)}")
    if verified.facts:
        more = [f"and {len(verified.facts) - _MOST_FACTS} more"] if len(verified.facts) > _MOST_FACTS else []
        lines.append(f"taken otherwise   {'; '.join([*map(str, verified.facts[:_MOST_FACTS]), *more])}")
    if verified.told:
        of_each = (
            name if "*" in fields else f"{name} ({', '.join(fields)})"
            for name, fields in verified.told.items()
        )
        lines.append(f"told, not proven  {', '.join(of_each)}")
    return "\n".join(lines)
