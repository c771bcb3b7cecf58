"""The process that executes the code of a recorded run: it takes steps, looks into one, or exports a model, and tells what came of it.

It gets what it needs as its parent sends it, and nothing that it is compared with. Whatever is imported here is imported by
nobody else: the parent reads what is written into the pipe as `lockstep.proof.protocol` has it.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.calls import problems
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, Replay
from lockstep.checks.start_checks import find_initial_weights
from lockstep.clusters.reachability import LOCAL, cluster_address
from lockstep.data.table_pins import pinned, pins_of
from lockstep.driver.options import RunOptions
from lockstep.errors import JobImportError, LockstepError, first_line
from lockstep.job.inputs.external_facts import MOVED
from lockstep.job.inputs.imports import FIELD, files_here, recorded_beside, source_fields
from lockstep.job.recorded_source import imported_from, shadows
from lockstep.job.source import check_job_source, job_source_digest, job_sources
from lockstep.proof import protocol
from lockstep.proof.inspection import Inspection, InspectionRequest, sample_ids
from lockstep.proof.operator_trace import Microscope
from lockstep.proof.replaying import Replayed, replay_here, replay_spec
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.record.ledger.tables import read_history
from lockstep.spec.fields import Spec
from lockstep.spec.locations import RECORD_OFF

MOST_PROCESSES = 4096
"""How many processes and threads the code may have at once in a sandbox."""


def main() -> None:
    """Serve the parent, by the two pipes whose numbers are given, until it asks no more."""
    request_fd, answers = (int(number) for number in sys.argv[1:3])
    for number in (request_fd, answers):
        os.set_inheritable(number, False)
    with os.fdopen(request_fd, "rb") as requests, os.fdopen(answers, "wb") as pipe:
        serve(requests, pipe)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever the job has left running is of no more use


def serve(asked: BinaryIO, pipe: BinaryIO) -> None:
    """Execute what is asked for, one request after another. Returns where nothing more comes, or nobody listens."""
    with suppress(BrokenPipeError, EOFError):
        source, fields, folder = pickle.load(asked)
        if folder is None:
            _limit()
        execution = Executed(pipe, source, fields, folder)
        while True:
            kind, content = pickle.load(asked)
            with _errors_sent(execution), execution.imported(content["spec"]), pinned(pins_of(fields)):
                getattr(execution, kind)(**content)
            execution.tell("done")


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = MOST_PROCESSES if most == resource.RLIM_INFINITY else min(most, MOST_PROCESSES)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


@contextmanager
def _errors_sent(execution: Executed) -> Iterator[None]:
    """Tell the parent of an error, as one line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except LockstepError as error:
        _tell_error(execution, error)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        traceback.print_exc()
        _tell_error(execution, problems.EXECUTION_BROKE(got=first_line(error)))


def _tell_error(execution: Executed, error: LockstepError) -> None:
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "lockstep.errors")
    parts = {"evidence": error.evidence, "remedy": error.remedy, "facts": dict(error.facts)}
    execution.tell("error", error=kind, text=str(error), code=error.code, **parts)


@dataclass(slots=True)
class Executed:
    """The requests that can be served, by the names of its methods; what comes of them goes into `pipe`."""

    pipe: BinaryIO
    source: Mapping[str, bytes]
    """The recorded files of the job, by their paths below a source root."""
    fields: Mapping[str, Any]
    """The recorded identity's fields about these files, and about the versions of tables that change."""
    folder: str | None
    """The parent's folder for temporary files; None where the process is confined, and has such a folder of its own."""
    decided: bool = False
    recorded: Mapping[str, bytes] | None = None
    """The files that the job is imported from; None for those on the path."""

    def tell(self, kind: str, **content: Any) -> None:
        self.pipe.write(protocol.line(kind, **content))
        self.pipe.flush()

    def say(self, text: str) -> None:
        """Have the parent show a line."""
        self.tell("said", text=text)

    def row(self, row: StepRow) -> None:
        self.tell("row", row=protocol.step_document(row))

    def begun(self, fields: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self.tell("begun", fields=dict(fields), facts=dict(facts))

    def evaluation(self, row: EvaluationRow) -> None:
        self.tell("evaluation", row=protocol.evaluation_document(row))

    def enough(self) -> bool:
        return False

    def send(self, name: str, path: Path) -> None:
        """Send a file."""
        with path.open("rb") as file:
            protocol.write_file(self.pipe, name, file, path.stat().st_size)

    def _temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(dir=self.folder)

    # --- requests ---

    def steps(
        self,
        spec: Spec,
        replay: Replay,
        weights: bool = False,
        look: tuple[int, int] | None = None,
        cluster: Mapping[str, Any] | None = None,
        files: bool = False,
    ) -> None:
        """Take steps again, each told as it is done; then the evaluations, the summary, and what else is asked for."""
        if files:
            check_job_source(spec.job.use)
        microscope = None if look is None else Microscope(*look)
        with self._temporary_folder() as aside:
            weights_path = str(Path(aside, "led-to")) if weights else None
            replay = replace(replay, source=self.recorded, probe=microscope, weights=weights_path)
            replayed = (
                replay_here(spec, replay, self)
                if cluster is None
                else self._on_ray(spec, replay, cluster, Path(aside))
            )
            self.tell("summary", summary=dict(replayed.summary))
            if microscope is not None:
                self.tell("look", look=asdict(microscope.look))
            if files:
                self.tell("source", files=protocol.as_texts(_files(spec, replayed.fields)))
            for path in sorted(Path(aside, "led-to", "weights").glob("*")):
                self.send(path.name, path)

    def inspection(self, spec: Spec, replay: Replay, request: InspectionRequest) -> None:
        """Take steps again and show the last one of them."""
        with self._temporary_folder() as aside:
            shown = Inspection(request, Path(aside))
            ids = sample_ids(spec, request.step)
            if request.micro_batch is not None and request.micro_batch not in ids:
                raise problems.MICRO_BATCH(got=request.micro_batch, wanted=len(ids), step=request.step + 1)
            self.tell("beginning")
            replay_here(spec, replace(replay, source=self.recorded, probe=shown), shown)
            assert shown.replayed_row is not None  # the step was taken, or an error raised
            if request.micro_batch is not None:
                shown.keep_samples({request.micro_batch: ids[request.micro_batch]})
            self.row(shown.replayed_row)
            self.tell("micro-batches", micro_batches=shown.micro_batches(ids))
            for path in shown.files:
                self.send(path.name, path)

    def export(self, **arguments: Any) -> None:
        """Export a model, and send the files of the artifact with its description."""
        from lockstep.calls.model_export import export_here

        with self._temporary_folder() as aside:
            artifact = export_here(**arguments, folder=Path(aside))
            for path in sorted(Path(aside).rglob("*")):
                if path.is_file() and not path.is_symlink():
                    self.send(path.relative_to(artifact.parent).as_posix(), path)

    # --- the job ---

    @contextmanager
    def imported(self, spec: Spec) -> Iterator[None]:
        """Have the job imported from the files here where they are those of the record, and else from the recorded ones."""
        # Nothing that lies there is refused: the record is judged all the same.
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        if not self.decided:
            self.decided, self.recorded = True, self._recorded(spec) if self.fields or self.source else None
            for path in shadows(self.recorded or ()):
                self.say(
                    f"the recorded {path} is not imported: it would stand in for a module of Python's or Lockstep's"
                )
        with imported_from(self.recorded, self.folder) if self.recorded else nullcontext():
            yield

    def _recorded(self, spec: Spec) -> Mapping[str, bytes] | None:
        other_files = recorded_beside(self.fields)
        try:
            local_fields = {"job.source": job_source_digest(spec.job.use)}
            local_fields |= source_fields(files_here(spec.job.use, other_files))
        except (JobImportError, ImportError, SyntaxError, OSError, ValueError):
            local_fields = {}
        if local_fields == {
            name: self.fields.get(name)
            for name in ("job.source", *(f"{FIELD}{path}" for path in other_files))
        }:
            return None
        if not self.source:
            self.say("the run has no source/: the job's source here is used, and it differs")
            return None
        self.say("the job's source here differs: the recorded source is used")
        return self.source

    # --- on Ray ---

    def _on_ray(self, spec: Spec, replay: Replay, cluster: Mapping[str, Any], aside: Path) -> Replayed:
        """Take steps again as a run of its own, whose folder is gone afterwards."""
        from lockstep.calls.train import run_attempt

        options = RunOptions(address=cluster["address"], verbose=cluster["verbose"])
        with _folder(spec, options, aside) as folder:
            if replay.weights is not None:
                replay = replace(replay, weights=str(folder / "led-to"))
            origin = AttemptOrigin(replay=replay, table_versions=pins_of(self.fields))
            result = run_attempt(_placed(spec, folder, cluster["workers"]), origin, options)
            run_folder = Path(result.folder)
            history = read_history(run_folder)
            fields, environment = (
                json.loads((run_folder / f"{name}.json").read_text(encoding="utf-8"))
                for name in ("fields", "environment")
            )
            self.begun(fields, environment.get(MOVED) or {})
            for row in history.steps:
                if row.step > replay.step:
                    self.row(row)
            if replay.weights is not None and (folder / "led-to") != aside / "led-to":
                shutil.copytree(folder / "led-to", aside / "led-to")
            for evaluation in history.evaluations:
                if evaluation.step > replay.step:
                    self.evaluation(evaluation)
            return Replayed(summary=result.as_dict())


def _files(spec: Spec, fields: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a job that is on the path, by their paths below its root."""
    return {
        module.replace(".", "/")
        + ("/__init__.py" if path.name == "__init__.py" else ".py"): path.read_bytes()
        for module, path in job_sources(spec.job.use).items()
    } | files_here(spec.job.use, recorded_beside(fields))


def _placed(spec: Spec, folder: Path, workers: int | None) -> Spec:
    """The run's spec, with all that it leaves in `folder`, and on so many workers."""
    spec = replay_spec(find_initial_weights(spec))
    where = str(folder)
    update = {
        "record": spec.record.model_copy(update={"uri": RECORD_OFF, "folder": where}),
        "checkpoint": spec.checkpoint.model_copy(update={"storage": where, "every": None}),
    }
    if workers is not None:
        update["workers"] = spec.workers.model_copy(update={"min": workers, "max": workers})
    if spec.fork is not None and spec.fork.storage is None:
        update["fork"] = spec.fork.model_copy(update={"storage": spec.checkpoint.storage})
    return spec.model_copy(update=update)


@contextmanager
def _folder(spec: Spec, options: RunOptions, aside: Path) -> Iterator[Path]:
    """A folder that the workers can reach: on this machine anywhere, else beside the runs."""
    if cluster_address(options.address) == LOCAL:
        yield aside / "taken-again"
        return
    folder = Path(tempfile.mkdtemp(prefix=".verify-", dir=spec.folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
