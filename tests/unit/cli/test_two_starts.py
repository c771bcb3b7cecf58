"""Several commands on one run at one moment: one goes on, the others learn who holds the run and harm nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from lockstep.checkpoint.runs.lease import WATCH_S, leased
from lockstep.checkpoint.runs.names import give_name, run_of_name
from lockstep.checkpoint.runs.run_checkpoints import steps_of
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.record.ledger.journal_file import NAME
from lockstep.record.mirror.run_store import SWEEP_FILE
from lockstep.spec.loading import load_spec
from tests import in_process
from tests.unit.cli.test_command import ROOT, environment

STEPS = 30
JOB = [
    "jobs/digits/train.yaml", "job.use=tests.untraced_jobs:PacedDigits", "job.params={width: 8, pause_s: 0.05}",
    "record.uri=off", f"length.steps={STEPS}", "checkpoint.every.steps=5", "evaluate.every.steps=30",
]  # fmt: skip


SPEC, RUN_ID = JOB[0], "a" * 32

IMPORTS = """
import json, sys
from lockstep.cli.main import app

for words in json.loads(sys.argv[1]):
    try:
        app(words)
    except SystemExit as ended:
        slow = {"torch", "ray", "mlflow", "pandas", "tests.untraced_jobs"} & {*sys.modules}
        print(ended.code, sorted(slow), flush=True)
"""
"""Gives commands in one process, and says how each ended and what was imported by then."""


class Ended(NamedTuple):
    """How a command ended, and the seconds that it computed and was there."""

    code: int
    cpu_s: float
    wall_s: float
    told: dict[str, Any]
    err: str


class Commands:
    """Commands that begin at one moment, forked by a process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._forks = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.cli.commands_at_once"],
            cwd=ROOT,
            env=environment(PYTHONPATH=f"{ROOT}/platform:{ROOT}", PYTHONHASHSEED="0"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._forks.stdout is not None
        return self._forks.stdout.readline().strip()

    def _ask(self, **what: Any) -> Any:
        assert self._forks.stdin is not None
        self._forks.stdin.write(json.dumps(what) + "\n")
        self._forks.stdin.flush()
        return json.loads(self._line())

    def start(self, *commands: list[str], delays: list[float] | None = None) -> list[int]:
        pids = self._ask(start=commands, into=str(self.folder), delays=delays or [0.0] * len(commands))
        return [int(pid) for pid in pids]

    def ended(self, pid: int) -> Ended:
        code, cpu_s = self._ask(wait=pid)
        out, err = (self.folder / f"{pid}.out", self.folder / f"{pid}.err")
        seconds = self.folder / f"{pid}.seconds"
        return Ended(
            int(code),
            cpu_s,
            float(seconds.read_text()) if seconds.exists() else -1.0,
            json.loads(out.read_text() or "{}"),
            err.read_text(),
        )

    def close(self) -> None:
        assert self._forks.stdin is not None and self._forks.stdout is not None
        self._forks.stdin.close()
        self._forks.wait(30)
        self._forks.stdout.close()


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("told"))
    yield commands
    commands.close()


class Place(NamedTuple):
    """Where the runs of a round lie."""

    storage: str
    words: list[str]

    def train(self, *more: str) -> list[str]:
        return ["train", *JOB, "--local", "--json", "--run", "night", *self.words, *more]

    def resume(self, run_id: str, *more: str) -> list[str]:
        return ["resume", run_id, "--local", "--json", "--uri", "off", *self.words, *more]

    def run_id(self) -> str | None:
        return run_of_name(open_storage(self.storage), "night")

    def saved(self) -> int:
        run_id = self.run_id()
        return max(steps_of(self.storage, run_id), default=0) if run_id else 0


def on_disk(folder: Path) -> Place:
    return Place(str(folder / "runs"), [f"checkpoint.storage={folder}/runs"])


def on_s3(folder: Path, query: str) -> Place:
    storage = f"s3://key:secret@runs/{uuid.uuid4().hex}?{query}"
    return Place(storage, [f"checkpoint.storage={storage}", f"record.folder={folder}/record"])


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest) -> Callable[[Path], Place]:
    return on_disk if request.param == "disk" else partial(on_s3, query=request.getfixturevalue("s3"))


@pytest.fixture(scope="module")
def digest(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> str:
    """That of a run which nothing disturbs."""
    (pid,) = commands.start(on_disk(tmp_path_factory.mktemp("alone")).train())
    ended = commands.ended(pid)
    assert ended.code == 0, ended.err
    return str(ended.told["weights_digest"])


def saved(place: Place, at_least: int, patience_s: float = 120.0) -> None:
    until = time.monotonic() + patience_s
    while place.saved() < at_least:
        assert time.monotonic() < until, "nothing was saved"
        time.sleep(0.1)


def one_goes_on(ended: list[Ended], digest: str) -> Ended:
    """All but one are told who holds the run, in time; that one has the bits of a run left alone."""
    went_on = [one for one in ended if one.code == 0]
    assert len(went_on) == 1, [(one.code, one.err[-300:]) for one in ended]
    for one in ended:
        if one.code == 0:
            continue
        assert one.code == 2, one.err
        assert " is held by process " in one.told["error"] and " on host " in one.told["error"], one.told
        assert one.cpu_s + WATCH_S < 5.0, "it waits no longer than that, and computes the rest"
    assert went_on[0].told["weights_digest"] == digest
    assert went_on[0].told["step"] == STEPS
    return went_on[0]


def round_of(commands: Commands, place: Place, rng: random.Random, digest: str) -> dict[str, float]:
    """A seeded round: a fresh start, one on a run that lives, or one on a run that was killed; two to eight commands."""
    before = rng.choice(["nothing", "living", "killed"])
    count = rng.randint(2, 8)
    pids: list[int] = []
    if before != "nothing":
        pids = commands.start(place.train())
        saved(place, rng.choice([5, 10]))
        if before == "killed":
            os.kill(pids[0], signal.SIGKILL)
            assert commands.ended(pids.pop()).code == -signal.SIGKILL
    run_id = place.run_id()
    each = [
        place.resume(run_id) if run_id is not None and rng.random() < 0.5 else place.train()
        for _ in range(count)
    ]
    pids += commands.start(*each, delays=[rng.random() * rng.choice([0.0, 0.3]) for _ in each])
    ended = [commands.ended(pid) for pid in pids]
    went_on = one_goes_on(ended, digest)
    assert went_on.told["attempts"] == (2 if before == "killed" else 1)
    refused = [one for one in ended if one.code == 2]
    return {"wall_s": max(one.wall_s for one in refused), "cpu_s": max(one.cpu_s for one in refused)}


EXACT = pytest.mark.exact


# a fresh start, a run that was killed, one that lives
@pytest.mark.thinned(2)
@pytest.mark.scenario
@pytest.mark.parametrize(
    ("seed", "place"),
    [
        (5, "disk"), (7, "s3"),
        *(pytest.param(*each, marks=EXACT) for each in [(2, "disk"), (2, "s3"), (5, "s3"), (7, "disk")]),
    ],
    indirect=["place"],
)  # fmt: skip
def test_of_several_commands_at_once_one_goes_on(
    commands: Commands, digest: str, place: Callable[[Path], Place], tmp_path: Path, seed: int
) -> None:
    round_of(commands, place(tmp_path), random.Random(seed), digest)


@pytest.mark.exact
@pytest.mark.parametrize("seed", range(100, 150))
def test_of_several_commands_at_once_one_goes_on_a_hundred_times(
    commands: Commands, digest: str, place: Callable[[Path], Place], tmp_path: Path, seed: int
) -> None:
    print(round_of(commands, place(tmp_path), random.Random(seed), digest))


@pytest.mark.scenario
@pytest.mark.parametrize("place", ["disk", pytest.param("s3", marks=EXACT)], indirect=True)
def test_a_takeover_ends_the_holder_after_its_step(
    commands: Commands, digest: str, place: Callable[[Path], Place], tmp_path: Path
) -> None:
    """The holder saves, says who took over, and the run goes on from there."""
    here = place(tmp_path)
    (first,) = commands.start(here.train())
    saved(here, 5)
    run_id = here.run_id()
    assert run_id is not None
    (second,) = commands.start(here.resume(run_id, "--takeover"))
    held, took = commands.ended(first), commands.ended(second)
    assert held.code == 1 and f"was taken over by process {second} on host" in held.told["error"], held
    assert took.code == 0, took.err
    assert (took.told["weights_digest"], took.told["step"], took.told["attempts"]) == (digest, STEPS, 2)
    journal = Path(took.told["folder"], NAME).read_text()
    assert '{"failed":' not in journal  # how it ends is for the newer attempt to say


@pytest.mark.scenario
def test_a_holder_that_is_stopped_keeps_its_run(commands: Commands, digest: str, tmp_path: Path) -> None:
    """Its process lives on this machine, so it may go on: only a takeover may take that from it."""
    here = on_disk(tmp_path)
    (first,) = commands.start(here.train())
    saved(here, 5)
    run_id = here.run_id()
    assert run_id is not None
    os.kill(first, signal.SIGSTOP)
    (asked,) = commands.start(here.resume(run_id))
    refused = commands.ended(asked)
    os.kill(first, signal.SIGCONT)
    assert refused.code == 2 and "which lives, but was not heard for 3.5 s" in refused.told["error"]
    held = commands.ended(first)
    assert (held.code, held.told["weights_digest"]) == (0, digest), held.err


@pytest.mark.scenario
@pytest.mark.parametrize("place", ["disk", pytest.param("s3", marks=EXACT)], indirect=True)
def test_who_is_refused_has_imported_nothing_that_takes_long(
    place: Callable[[Path], Place], tmp_path: Path
) -> None:
    """Torch, Ray and MLflow take longer than the five seconds in which a second command is to be told."""
    here, sweep_id = place(tmp_path), "b" * 32
    storage, spec = open_storage(here.storage), load_spec(SPEC, [*JOB[1:], *here.words])
    give_name(storage, "night", RUN_ID)
    record = spec.folder / RUN_ID
    record.mkdir(parents=True)
    (record / "spec.yaml").write_text(yaml.safe_dump(spec.document()))
    swept = spec.folder / sweep_id
    swept.mkdir()
    (swept / SWEEP_FILE).touch()
    folder = f"record.folder={spec.folder}"
    commands = [
        (RUN_ID, ["train", *JOB, "--run", "night", *here.words]),
        (RUN_ID, ["resume", RUN_ID, *here.words]),
        (RUN_ID, ["resume", RUN_ID, folder]),  # whose storage its folder knows
        (sweep_id, ["resume", sweep_id, folder]),
        (RUN_ID, ["submit", RUN_ID, folder]),
    ]
    if "://" in here.storage:
        commands.append((RUN_ID, ["submit", SPEC, *JOB[1:], "--run", "night", *here.words]))
    with leased(storage, RUN_ID, "the run"), leased(LocalStorage(spec.folder), sweep_id, "the sweep"):
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS, json.dumps([words for _, words in commands])],
            cwd=ROOT,
            env=environment(PYTHONPATH=f"{ROOT}/platform:{ROOT}", PYTHONHASHSEED="0"),
            capture_output=True,
            text=True,
            check=True,
        )
    told = done.stderr.splitlines()
    assert len(told) == len(commands), done.stderr
    for (run_id, _), line in zip(commands, told, strict=True):
        assert f"{run_id} is held by process {os.getpid()} on host" in line
    assert done.stdout.splitlines() == ["2 []"] * len(commands)


def test_takeover_wants_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *JOB, "--local", "--takeover", *on_disk(tmp_path).words]
    code, out, err = in_process.here(monkeypatch, capfd, ROOT, *words)
    assert (code, out) == (2, "") and err.startswith("lockstep: takeover: ")
    assert not (tmp_path / "runs").exists()
