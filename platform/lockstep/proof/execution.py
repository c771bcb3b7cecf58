"""The code of a recorded run executed in a process of its own, for one that judges what comes of it.

The judging process never imports a job. It sends what is to be done, and reads rows and files (`protocol`), which it compares
by itself. The other process is given nothing that it is compared with: no ledger, no digest of a result, no key. What it
prints is shown line by line, as the job's.
"""

from __future__ import annotations

import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from lockstep.checkpoint.runs.run_folder import Replay
from lockstep.errors import JobError
from lockstep.proof import problems, protocol, sandbox
from lockstep.proof.operator_trace import Look
from lockstep.proof.recorded_run import copy_checkpoint
from lockstep.proof.replaying import Informed, Replayed, Watching
from lockstep.proof.sandbox import Sandbox
from lockstep.spec.fields import Spec
from lockstep.training.worker_environment import sent_environment

LOOK_S = 0.5
"""How often a silent process is checked for being alive, in seconds."""

END_S = 20.0
"""How long a process with a cluster of its own may take to end by itself."""

MOST_PRINTED = 1 << 20
"""So many bytes of what a job prints are shown, in lines of at most 4,000 characters."""

MOST_SAID = 1_000
"""So many lines a process may have shown besides its rows."""

IN_SANDBOX = (
    "the run's code was in a sandbox, without network, and with no folder to write to but temporary ones; "
    "where it needs more and you trust it, --no-sandbox runs it as you"
)
"""The note for code that fails in a sandbox."""


class Executor(Protocol):
    """A process that executes what it is sent."""

    @property
    def asked(self) -> BinaryIO:
        """The pipe into which requests are written."""

    @property
    def answers(self) -> BinaryIO:
        """The pipe from which its answers are read."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def end(self, *, at_once: bool) -> None:
        """Have it end; all that it has started ends with it."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How the code of a run is executed. `say` shows a line to a person."""

    say: Callable[[str], None]
    sandbox: Sandbox | None = None
    """What confines it; None for a process like any other of the user's."""
    terminal: bool = False
    """Whether it has the user's terminal, as a debugger needs it."""


class PythonProcess:
    """A new interpreter that executes what it is sent."""

    def __init__(self, settings: ProcessSettings) -> None:
        requests, to_ask = os.pipe()
        to_answer, answers = os.pipe()
        words = [sys.executable, "-P", "-c", "from lockstep.calls.executor import main; main()"]
        words += [str(requests), str(answers)]
        folder, environment = Path.cwd(), _environment()
        try:
            if settings.sandbox is not None:
                words, environment = settings.sandbox.command(words, folder), sandbox.environment(environment)
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                pass_fds=(requests, answers),
                stdin=None if settings.terminal else subprocess.DEVNULL,
                stdout=None if settings.terminal else subprocess.PIPE,
                stderr=None if settings.terminal else subprocess.STDOUT,
                start_new_session=not settings.terminal,  # it cannot reach the terminal, and can be ended with all that it started
            )
        finally:
            os.close(requests)
            os.close(answers)
        self.asked: BinaryIO = os.fdopen(to_ask, "wb")
        self.answers: BinaryIO = os.fdopen(to_answer, "rb", 0)
        self._relay: threading.Thread | None = None
        if self._process.stdout is not None:
            self._relay = threading.Thread(
                target=_show,
                args=(self._process.stdout, settings.say),
                name="lockstep-job-output",
                daemon=True,
            )
            self._relay.start()

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self, *, at_once: bool) -> None:
        with suppress(OSError):
            self.asked.close()  # a process that waits for more ends by itself
        if not at_once:  # its cluster ends with it, in order
            for limit in (LOOK_S, END_S):
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(limit)
                    break
                self._process.terminate()
        with suppress(ProcessLookupError, PermissionError):
            if self._relay is None:
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.answers.close()
        if self._relay is not None:
            self._relay.join(LOOK_S)


Start = Callable[[ProcessSettings], Executor]
START: Start = PythonProcess
"""What starts a process that executes a run's code."""


def _environment() -> dict[str, str]:
    """The variables of this process, with those that an exact run needs before Python starts, and without keys of the record's store: the other process has nothing to do there."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_TRACKING_")}
    return {**inherited, **sent_environment(), "PYTHONPATH": os.pathsep.join(_paths())}


def _paths() -> list[str]:
    """Where this process finds Lockstep and what it needs: never the working directory, whose files are the job's."""
    installed = tuple(os.path.realpath(path) + os.sep for path in (sys.prefix, sys.base_prefix))
    root = str(sandbox.ROOT)
    candidates = (path for path in sys.path if Path(path).is_absolute() and Path(path) != Path.cwd())
    return [
        root,
        *(path for path in candidates if path != root and not os.path.realpath(path).startswith(installed)),
    ]


def _show(pipe: BinaryIO, say: Callable[[str], None]) -> None:
    """Show what a job prints, so far; what is beyond the bound is read and dropped."""
    remaining = MOST_PRINTED
    with pipe:
        while piece := pipe.readline(4000):
            if remaining <= 0:
                continue
            remaining -= len(piece)
            if text := protocol.plain_text(piece.decode(errors="replace").rstrip()):
                say(f"job: {text}")
            if remaining <= 0:
                say("job: what it prints from here on is not shown")


@dataclass(slots=True)
class Execution:
    """A run's code at work. `job` is what every request is about: the spec's job, its recorded files, and their digests."""

    settings: ProcessSettings
    source: Mapping[str, bytes] = field(default_factory=dict)
    """The recorded files of the job, by their paths below a source root."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The recorded identity's fields about these files, and about the versions of tables that change: with the first it is decided whether those that lie here are the same."""
    cluster: Mapping[str, Any] | None = None
    """The cluster on which steps are taken: `address`, `workers`, `verbose`; None for the process itself."""
    _process: Executor | None = None
    _buffer: bytearray = field(default_factory=bytearray)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    """For the process's temporary files: it is killed, and cannot remove them. One that is confined can only read it."""

    @property
    def visible_folder(self) -> Path | None:
        """A folder that a confined process can read, for what it needs of the storage of the run; None where the process is not confined."""
        self._started()
        return None if self._folder is None or self.settings.sandbox is None else Path(self._folder.name)

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(at_once=self.cluster is None)

    def close(self, *, at_once: bool = True) -> None:
        """End the process. Nothing that it does or says afterwards is heard."""
        if self._process is not None:
            self._process.end(at_once=at_once)
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None
        self._buffer.clear()

    def ask(self, kind: str, **content: Any) -> Iterator[dict[str, Any]]:
        """Have the process do something, and give what it says until it is done; it is started for the first request.

        After a `file` comes its content, which is to be read by `receive`. JobError where the process ends or does not keep to the
        protocol; raises what it tells of.
        """
        process = self._started()
        try:
            pickle.dump((kind, content), process.asked)
            process.asked.flush()
        except BrokenPipeError:
            raise self._lost() from None
        count = 0
        while (message := protocol.parsed(self._line()))["kind"] != "done":
            if message["kind"] == "error":
                if self.settings.sandbox is not None:
                    self.settings.say(IN_SANDBOX)
                raise protocol.error_told(message)
            if message["kind"] != "said":
                yield message
                continue
            count += 1
            if count > MOST_SAID:
                raise protocol.broken(f"more than {MOST_SAID} lines to show")
            self.settings.say(protocol.plain_text(message.get("text")))

    def receive(self, sent: protocol.FileSent, path: Path, most: int) -> None:
        """Write a file that was announced as `path`, which is new. ProtocolError where it has more than `most` bytes."""
        if sent.size > most:
            raise protocol.broken(
                f"a file {sent.name!r} of {sent.size} bytes, where at most {most} can be right"
            )
        remaining = sent.size
        with path.open("xb") as file:
            while remaining:
                if not self._buffer:
                    self._fill()
                piece = self._buffer[:remaining]
                file.write(piece)
                del self._buffer[: len(piece)]
                remaining -= len(piece)

    def _started(self) -> Executor:
        if self._process is None:
            settings = self.settings
            self._folder = tempfile.TemporaryDirectory(
                prefix="lockstep-executed-", ignore_cleanup_errors=True
            )
            folder: str | None = self._folder.name
            if settings.sandbox is not None:
                needed = [*settings.sandbox.needed, Path(self._folder.name)]
                settings = replace(settings, sandbox=replace(settings.sandbox, needed=needed))
                folder = None  # its temporary folder goes with it
            self._process = START(settings)
            try:
                pickle.dump((self.source, self.fields, folder), self._process.asked)
            except BrokenPipeError:
                raise self._lost() from None
        return self._process

    def _line(self) -> bytes:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > protocol.MOST_BYTES:
                raise protocol.broken(f"a line of more than {protocol.MOST_BYTES} bytes")
            self._fill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _fill(self) -> None:
        """Wait for more. JobError where nothing more can come: a process that the job has started may hold the pipe open."""
        process = self._started()
        with selectors.DefaultSelector() as selector:
            selector.register(process.answers, selectors.EVENT_READ)
            while not selector.select(LOOK_S):
                if process.poll() is not None and not selector.select(0):
                    raise self._lost()
        piece = os.read(process.answers.fileno(), 1 << 20)
        if not piece:
            raise self._lost()
        self._buffer += piece

    def _lost(self) -> JobError:
        process = self._started()
        with suppress(OSError):
            process.asked.close()
        code = None
        for _ in range(20):
            code = process.poll()
            if code is not None:
                break
            threading.Event().wait(0.05)
        how = (
            "closed its pipe"
            if code is None
            else f"was killed by signal {-code}"
            if code < 0
            else f"ended with {code}"
        )
        return problems.PROCESS_ENDED(got=how)


# --- steps ------------------------------------------------------------------------------------------------------


def take_steps(
    execution: Execution,
    spec: Spec,
    replay: Replay,
    watch: Watching,
    *,
    weights: Path | None = None,
    most: Callable[[str], int] = lambda name: 1 << 40,
    look: tuple[int, int] | None = None,
    files: bool = False,
) -> Replayed:
    """Have steps taken again, up to the one after which `watch` has enough.

    Where the folder `weights` is given, the weights that they lead to are put there, each file of at most `most` bytes by its
    name. `look` is a step and a micro-batch (both from 0) that are looked into. Raises what the other process tells of.
    """
    replayed, newest, last = Replayed(), replay.step, replay.step
    spec, replay = handed(spec, replay, execution.visible_folder)
    request = {"spec": spec, "replay": replay, "weights": weights is not None, "look": look, "files": files}
    for message in execution.ask("steps", **request, cluster=execution.cluster):
        match message["kind"]:
            case "begun" if not replayed.fields and not replayed.steps:
                replayed.fields = protocol.mapping(message.get("fields"))
                replayed.facts = protocol.mapping(message.get("facts", {}))
                if isinstance(watch, Informed):
                    watch.begun(replayed.fields, replayed.facts)
            case "row" if not replayed.summary:
                row = protocol.step_row(message.get("row"))
                follows = row.step == newest + 1 or (
                    not replayed.steps and row.step > newest
                )  # a fork begins later
                if not follows or row.step > replay.until:
                    raise protocol.broken(f"step {row.step} after step {newest}")
                newest = row.step
                replayed.steps[newest] = row
                watch.row(row)
                if watch.enough() and row.step < replay.until:
                    execution.close()
                    return replayed
            case "evaluation" if not replayed.summary:
                evaluation = protocol.evaluation_row(message.get("row"))
                if not (last < evaluation.step <= replay.until):
                    raise protocol.broken(
                        f"an evaluation of step {evaluation.step} after that of step {last}"
                    )
                last = evaluation.step
                replayed.evaluations[evaluation.step] = evaluation
            case "summary" if not replayed.summary:
                replayed.summary = protocol.mapping(message.get("summary"))
            case "look" if look is not None and replayed.look is None:
                replayed.look = _parsed_look(message.get("look"))
            case "source" if files and not replayed.source:
                replayed.source = protocol.texts(message.get("files"))
            case "file" if weights is not None:
                sent = protocol.file_sent(message)
                if Path(sent.name).name != sent.name or (weights / sent.name).exists():
                    raise protocol.broken(f"a file {sent.name!r}")
                execution.receive(sent, weights / sent.name, most(sent.name))
            case kind:
                raise protocol.broken(f"a {protocol.plain_text(kind, 40)!r}")
    return replayed


def handed(spec: Spec, replay: Replay, folder: Path | None) -> tuple[Spec, Replay]:
    """A spec and a replay for a process that sees no storage but `folder`: with a copy there of the checkpoint that it starts from."""
    if folder is None:
        return spec, replay
    for leftover in folder.iterdir():
        shutil.rmtree(leftover)
    if replay.step:
        return spec, replace(
            replay, storage=copy_checkpoint(replay.storage, replay.run_id, replay.step, folder)
        )
    if spec.fork is not None:
        fork = spec.fork
        storage = copy_checkpoint(fork.storage or spec.checkpoint.storage, fork.run, fork.step, folder)
        spec = spec.model_copy(update={"fork": fork.model_copy(update={"storage": storage})})
    return spec, replay


def _parsed_look(document: Any) -> Look:
    try:
        return Look.of(protocol.mapping(protocol.shown(document)))
    except (TypeError, ValueError, AttributeError) as error:
        raise protocol.broken("a look that is none") from error
