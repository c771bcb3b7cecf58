"""Taking a recorded run's model out of Lockstep: what `lockstep export` and `lockstep predict` do, for Python."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from lockstep.calls import problems
from lockstep.calls.executions import execution_of
from lockstep.checkpoint.stored_tensor import in_memory
from lockstep.driver.options import RunOptions
from lockstep.errors import StorageError
from lockstep.export import arrays
from lockstep.export import problems as export_problems
from lockstep.export.artifact import Artifact, description, names_in, read
from lockstep.export.exporting import Weights, export_weights
from lockstep.export.formats import (
    ExportFormat,
    Safetensors,
    artifact_path,
    check_predicts,
    format_named,
    loaded,
)
from lockstep.export.prediction import batch_size, predicted
from lockstep.export.publication import aside_of, make_folder_below
from lockstep.files import private
from lockstep.proof import protocol
from lockstep.proof.execution import Execution
from lockstep.proof.recorded_run import folder_of, named_run, recorded_run
from lockstep.proof.summary_checks import DIGEST_OF
from lockstep.record.mirror.run_store import StoredRun
from lockstep.record.mirror.stores import keep_files
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.locations import tracking_uri
from lockstep.training.auxiliary_state import beside_path, load_beside, save_beside
from lockstep.training.determinism import determinism
from lockstep.training.integrity.state_digest import tree_digest, weights_digest
from lockstep.training.stored_weights import stored_folder

MOST_BYTES = 1 << 40
"""The largest file of an artifact that is taken from the process that makes it."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An artifact that was written, and where it lies."""

    path: str
    artifact: Artifact

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, **self.artifact.model_dump(mode="json")}


@dataclass(frozen=True, slots=True)
class Predicted:
    """Outputs that were written: for so many rows, from calls of `batch` rows."""

    path: str
    rows: int
    batch: int
    artifact: Artifact

    def as_dict(self) -> dict[str, Any]:
        facts = self.artifact.model_dump(
            mode="json", include={"run", "step", "weights", "weights_digest", "format"}
        )
        return {"path": self.path, "rows": self.rows, "batch": self.batch, **facts}


def export(
    run_id: str,
    *,
    form: str = "pt2",
    best: bool = False,
    fixed_batch: bool = False,
    inputs: str | Path | None = None,
    rtol: float | None = None,
    max_file_size: str | None = None,
    uri: str | None = None,
    storage: str | Path = "runs",
    options: RunOptions | None = None,
    sandboxed: bool = False,
) -> Exported:
    """Export a run's weights, the final ones or the `best`, in a format, and compare the artifact with eager mode.

    The final weights are their average where the run has one. It is compared on the job's example, and on the `inputs` of a file where
    one is given; `rtol` is the relative difference that is allowed. The files of `shards` have at most
    `max_file_size` of tensors, such as `2GB`; default: 5GB. The artifact goes into the run's folder, and to its store. The job is
    imported by a process of its own, confined where it is `sandboxed`. SpecError
    where there is no such run, format or weights; ExportError where the model cannot be exported or the artifact computes something else.
    """
    options = options or RunOptions(local=True)
    export_format = format_named(form)
    if rtol is not None and not 0 <= rtol < 1:
        raise problems.RTOL(got=f"{rtol:g}")
    if max_file_size is not None:
        export_format = export_format.limited(max_file_size)
    export_format.check_installed()
    store, storage = tracking_uri(uri), Path(storage).absolute()
    stored_run, spec, folder = _located_run(run_id, store, storage)
    weights = _weights(stored_run, folder, best=best)
    with private(spec.record.private), determinism("fast", spec.threads):
        if isinstance(export_format, Safetensors):
            file = export_weights(weights, export_format, folder)
        else:
            file = _export_model(
                weights,
                export_format,
                store,
                folder,
                stored_run.summary,
                options,
                sandboxed=sandboxed,
                inputs=None if inputs is None else Path(inputs).absolute(),
                fixed=fixed_batch,
                rtol=rtol,
            )
    artifact = read(file)
    _keep(store, run_id, [*artifact.paths(file), description(file)], folder)
    return Exported(str(file), artifact)


def predict(
    run_id: str,
    file: str | Path,
    *,
    form: str = "pt2",
    best: bool = False,
    out: str | Path | None = None,
    batch: int | None = None,
    uri: str | None = None,
    storage: str | Path = "runs",
) -> Predicted:
    """Run the exported model of a run on the rows of a file, `batch` at a time, and write its outputs to `out`.

    The job is not needed. `out` is `<name>.outputs` beside the file where it is not given. SpecError where there is no such run, artifact
    or file, or the inputs do not fit; ExportError where the artifact is damaged or fails.
    """
    export_format, inputs_path = format_named(form), Path(file)
    check_predicts(export_format)
    export_format.check_installed()
    arrays.check_suffix("inputs", inputs_path)
    if out is not None and Path(out).exists() and inputs_path.exists() and inputs_path.samefile(out):
        raise problems.REPLACES_INPUTS(got=out)
    stored_run, spec, folder = _located_run(run_id, tracking_uri(uri), Path(storage).absolute())
    path = artifact_path(folder, export_format, _name(stored_run, best=best))
    command = f"lockstep export {run_id} --format {export_format.name}{' --best' if best else ''}"
    if not path.exists():
        raise problems.NOT_EXPORTED(run=run_id, got=path.relative_to(folder), command=command)
    artifact = read(path)
    if artifact.weights_digest != stored_run.summary[DIGEST_OF[artifact.weights]]:
        raise problems.EXPORTED_BEFORE(got=path.name, step=artifact.step, command=command)
    several = inputs_path.suffix == ".npy" and len(artifact.outputs) > 1
    target = Path(
        out or inputs_path.with_name(f"{inputs_path.stem}.outputs{'.npz' if several else inputs_path.suffix}")
    )
    arrays.check_outputs(target, artifact)
    size = batch_size(artifact, batch)
    inputs = arrays.inputs_of(arrays.read(inputs_path), artifact.inputs, artifact.fixed_batch)
    with determinism("fast", spec.threads):
        outputs = predicted(loaded(artifact, path), artifact, inputs, size)
    arrays.write(target, outputs)
    return Predicted(str(target), inputs.rows, size, artifact)


def _keep(store: str, run_id: str, files: Sequence[Path], folder: Path) -> None:
    """Keep a copy of an artifact's files, which are in the run's `folder`, in the run's store."""
    for parent in sorted({file.parent for file in files}):
        inside = [file for file in files if file.parent == parent]
        keep_files(store, run_id, inside, parent.relative_to(folder).as_posix())


def _located_run(run_id: str, store: str, storage: Path) -> tuple[StoredRun, Spec, Path]:
    """A run's record, its spec and its folder. SpecError where there is no such run, or no folder of it here."""
    stored_run = named_run(run_id, store, storage)
    if owner := stored_run.summary.get("reused_from"):
        raise problems.REUSES(run=run_id, owner=owner)
    spec = load_spec(stored_run.spec)
    folder = folder_of(run_id, spec, storage)
    if not folder.is_dir():
        raise problems.FOLDER_ELSEWHERE(run=run_id, got=folder)
    return stored_run, spec, folder


def _name(stored_run: StoredRun, *, best: bool) -> str:
    """Which file of weights is meant. SpecError where the run has none."""
    if best:
        if not stored_run.summary.get(DIGEST_OF["best"]):
            raise problems.NO_BEST(run=stored_run.run_id)
        return "best"
    if not stored_run.summary.get(DIGEST_OF["final"]):
        raise problems.NO_FINAL_WEIGHTS(run=stored_run.run_id, got=stored_run.status)
    return "ema" if stored_run.summary.get(DIGEST_OF["ema"]) else "final"


def _weights(stored_run: StoredRun, folder: Path, *, best: bool) -> Weights:
    """The weights of a run, which are those of its record: else ExportError."""
    name = _name(stored_run, best=best)
    path = folder / "weights" / f"{name}.safetensors"
    try:
        state = stored_folder(path)
    except (OSError, ValueError, StorageError, safetensors.SafetensorError) as error:
        raise problems.WEIGHTS_UNREADABLE(file=path, got=error) from error
    digest = weights_digest(state, in_memory)
    if digest != (recorded := stored_run.summary[DIGEST_OF[name]]):
        raise export_problems.WEIGHTS_CHANGED(file=path, got=digest, wanted=recorded)
    step = stored_run.summary["best_step" if best else "step"]
    return Weights(stored_run.run_id, int(step), name, digest, state)


def _export_model(
    weights: Weights,
    form: ExportFormat,
    store: str,
    folder: Path,
    summary: Mapping[str, Any],
    options: RunOptions,
    *,
    sandboxed: bool,
    **arguments: Any,
) -> Path:
    """Have a process that may import the job make the artifact, and keep what it hands over as far as it is one of these weights."""
    run = recorded_run(weights.run, store, folder.parent)
    extra_state = _beside(summary, weights, folder)
    file = artifact_path(folder, form, weights.name)
    with tempfile.TemporaryDirectory(prefix="lockstep-export-") as aside, aside_of(folder, file) as path:
        weights_file = Path(aside, "weights.safetensors")
        safetensors.torch.save_file(
            {name: in_memory(value) for name, value in weights.state.items()}, weights_file
        )
        if extra_state:
            save_beside(weights_file, extra_state)
        needed = [Path(aside), *([] if arguments["inputs"] is None else [arguments["inputs"]])]
        request = {
            **arguments,
            "spec": run.spec,
            "form": form.name,
            "weights_file": weights_file,
            "weights": weights._replace(state={}),
            "beside": bool(extra_state),
        }
        with execution_of(run, options, sandboxed=sandboxed, hidden=None, needed=needed) as execution:
            _receive(execution, request, path)
            _check(path, weights, form)
    return file


def _receive(execution: Execution, request: Mapping[str, Any], path: Path) -> None:
    """Write the files of an artifact, which is to be `path`, and its description beside it."""
    for message in execution.ask("export", **request):
        if message["kind"] != "file":
            raise protocol.broken(f"a {protocol.plain_text(message['kind'], 40)!r}")
        sent = protocol.file_sent(message)
        parts = sent.name.split("/")
        allowed = parts[0] == path.name or sent.name == description(path).name
        if not allowed or any(part in ("", ".", "..") for part in parts):
            raise protocol.broken(f"a file {sent.name!r}")
        target = path.parent / sent.name
        make_folder_below(path.parent, target.parent)
        execution.receive(sent, target, MOST_BYTES)


def _check(path: Path, weights: Weights, form: ExportFormat) -> None:
    """ExportError where the description is not of these weights: who made the artifact has run the job's code."""
    artifact = read(path)
    origin = artifact.run, artifact.step, artifact.weights, artifact.weights_digest
    described = *origin, artifact.format, artifact.files
    expected = weights.run, weights.step, weights.name, weights.digest, form.name, names_in(path)
    if described != expected:
        raise export_problems.ANOTHER_DESCRIPTION(file=path.name, got=described, wanted=expected)


def _beside(summary: Mapping[str, Any], weights: Weights, folder: Path) -> Mapping[str, Any]:
    """What the run's model computed with besides the weights; empty where there is nothing."""
    name = "best" if weights.name == "best" else "final"
    recorded = summary["beside"][name]
    if recorded is None:
        return {}
    path = folder / "weights" / f"{name}.safetensors"
    if (digest := tree_digest(extra_state := load_beside(path))) != recorded:
        raise export_problems.WEIGHTS_CHANGED(file=beside_path(path), got=digest, wanted=recorded)
    return extra_state
