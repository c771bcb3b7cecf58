"""The commands that take a model out of Lockstep: `export` and `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.command_output import RUNS, Json, RunId, Storage, Uri, Verbose, answered, began, running
from lockstep.cli.commands import command
from lockstep.cli.proofs import Sandbox

if TYPE_CHECKING:
    from lockstep.calls.exporting import Exported, Predicted

Best = Annotated[bool, typer.Option("--best", help="the weights of the best evaluation, with early_stop")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    command(app, "serve", "lockstep export RUN", "lockstep export RUN --format onnx --best")(export)
    command(app, "serve", "lockstep predict RUN inputs.npy")(predict)


def export(
    run: RunId,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="form of the model: pt2, onnx, safetensors (weights alone) or another of docs/export.md",
        ),
    ] = "pt2",
    best: Best = False,
    fixed_batch: Annotated[
        bool, typer.Option("--fixed-batch", help="the artifact takes exactly as many rows as the example")
    ] = False,
    inputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="compare on these inputs as well: .npy, .npz or .safetensors"),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(metavar="R", help="relative difference that is allowed; default: 0, for onnx 1e-4"),
    ] = None,
    max_file_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="most bytes of tensors in a file of shards, such as 2GB; default: 5GB"
        ),
    ] = None,
    sandbox: Sandbox = False,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Export a run's model. What was written is compared with the model itself."""
    began_at = began()
    with answered(json_, verbose) as answer:
        from lockstep.calls.exporting import export as export_run

        with running(json_, began_at=began_at, local=True, verbose=verbose) as options:
            result = export_run(
                run,
                form=format_,
                best=best,
                fixed_batch=fixed_batch,
                inputs=inputs,
                rtol=rtol,
                max_file_size=max_file_size,
                uri=uri,
                storage=storage,
                options=options,
                sandboxed=sandbox,
            )
        answer(result.as_dict(), lambda: exported_as_text(result))


def predict(
    run: RunId,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="inputs, a row each: .npy, .npz or .safetensors")
    ],
    format_: Annotated[
        str, typer.Option("--format", help="the artifact that is run, such as pt2 or onnx")
    ] = "pt2",
    best: Best = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="default: <name>.outputs next to FILE, in the same format"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="rows in one call; default: 256")
    ] = None,
    uri: Uri = None,
    storage: Storage = RUNS,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run the exported model of a run on a file of inputs. The job is not needed."""
    with answered(json_, verbose) as answer:
        from lockstep.calls.exporting import predict as predict_file

        result = predict_file(
            run, file, form=format_, best=best, out=output, batch=batch, uri=uri, storage=storage
        )
        answer(result.as_dict(), lambda: predicted_as_text(result))


def exported_as_text(exported: Exported) -> str:
    """An artifact that was written, for a person."""
    from lockstep.export.arrays import shape_text

    artifact, parity, path = exported.artifact, exported.artifact.parity, Path(exported.path)
    working_directory = Path.cwd()
    lines = [
        f"exported: {artifact.weights} weights of run {artifact.run}, step {artifact.step}, as {artifact.format}"
    ]
    for kind, values in (("input", artifact.inputs), ("output", artifact.outputs)):
        lines += [f"{kind:17} {tensor.name}: {tensor.dtype} {shape_text(tensor)}" for tensor in values]
    if not artifact.inputs:
        lines.append(f"compared          {parity.elements} weights, read again: every bit is equal")
    else:
        sizes = ", ".join(map(str, parity.batch_sizes))
        lines.append(f"compared          with eager mode, on {sizes} rows: {_difference(exported)}")
    lines += [f"warned            {note}" for note in artifact.notes]
    return "\n".join(
        [
            *lines,
            f"weights_digest    {artifact.weights_digest}",
            f"written           {path.relative_to(working_directory) if path.is_relative_to(working_directory) else path}",
        ]
    )


def _difference(exported: Exported) -> str:
    parity = exported.artifact.parity
    if not parity.differing:
        return "every bit is equal"
    return (
        f"{parity.differing} of {parity.elements} elements differ, by up to {parity.largest_difference:.2g} "
        f"(allowed: rtol {parity.rtol:g}, atol {parity.atol:g})"
    )


def predicted_as_text(predicted: Predicted) -> str:
    """Outputs that were written, for a person."""
    artifact = predicted.artifact
    return "\n".join(
        [
            f"predicted: {predicted.rows} rows, {predicted.batch} at a time, by the {artifact.format} of run {artifact.run}, step {artifact.step}",
            f"weights_digest    {artifact.weights_digest}",
            f"written           {predicted.path}",
        ]
    )
