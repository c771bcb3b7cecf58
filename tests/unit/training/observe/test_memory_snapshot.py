"""What a worker held is told by owner where its memory runs out, and before a limit kills it; looking changes no bit."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from lockstep.communication.group import Group
from lockstep.errors import ClusterError
from lockstep.job.loading import load_job
from lockstep.record.events.union import Document, Event, Finished, Warned
from lockstep.spec.loading import load_spec
from lockstep.training.driver_requests import NoRequests
from lockstep.training.loop import fit
from lockstep.training.observe import memory_snapshot
from lockstep.training.observe.memory_limits import Limit, group_limits, killing_limits
from lockstep.training.observe.memory_owners import Holdings, activation_bytes, holdings, saved_by
from lockstep.training.observe.memory_snapshot import asked_bytes, memory_watched
from tests.memory_jobs import DEPTH, WIDTH, control_group, enter

ROOT = Path(__file__).parents[4]
MB = 1 << 20


def document(**params: Any) -> dict[str, Any]:
    return {
        "job": {"use": "tests.memory_jobs:Growing", "params": params},
        "batch": {"global": 64, "micro": 16},
        "length": {"steps": 12},
        "optimizer": {"name": "adamw"},
        "record": {"uri": "off"},
        "threads": 1,
        "rehearsal": "off",
    }


def trained(document: dict[str, Any]) -> list[Event]:
    """The events of a run in this process whose memory is watched."""
    spec, events = load_spec(document), list[Event]()
    job, group = load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu"))
    with memory_watched(events.append, 0, 1):
        fit(spec, job, group, events.append, NoRequests())
    return events


def digest(events: list[Event]) -> str:
    (end,) = [event for event in events if isinstance(event, Finished)]
    return str(end.summary["weights_digest"])


def snapshots(events: list[Event]) -> list[dict[str, Any]]:
    return [
        json.loads(e.text)
        for e in events
        if isinstance(e, Document) and e.name.startswith("memory-") and e.name.endswith(".json")
    ]


# --- one step after another -------------------------------------------------------------------------------


@pytest.mark.scenario
def test_a_snapshot_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is taken while the run trains, at a limit that is always near, and none: the same weights."""
    plain = trained(document())
    assert not snapshots(plain)
    monkeypatch.setattr(memory_snapshot, "killing_limits", lambda: [Limit("a limit", 95, 100)])
    monkeypatch.setattr(memory_snapshot, "EVERY_S", 0.002)
    watched = trained(document())
    (snapshot,) = snapshots(watched)
    assert any(isinstance(event, Warned) and "memory: " in event.text for event in watched)
    assert snapshot["held_bytes"] > 0
    assert digest(watched) == digest(plain)
    assert digest(trained({**document(), "seed": 1})) != digest(plain)


@pytest.mark.scenario
def test_an_allocation_that_fails_names_the_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address space ends at step 4: parameters, optimizer and sums are told to the byte, and activations with their module."""
    events = list[Event]()
    spec = load_spec(document(after=3, wide=1 << 22))
    job, group = load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu"))
    with (
        pytest.raises(ClusterError, match=r"memory-attempt-1-rank-0\.txt") as error,
        memory_watched(events.append, 0, 1),
    ):
        fit(
            spec, job, group, events.append, NoRequests()
        )  # 64 GiB: more than any machine of ours lets a process ask for
    assert "the node has no memory left (step 4, micro-batch 0" in str(error.value)
    (snapshot,) = snapshots(events)
    owners = {item["owner"]: item for item in snapshot["owners"]}
    parameters = 4 * (DEPTH * (WIDTH * WIDTH + WIDTH) + WIDTH + 1)
    assert owners["parameters"]["held_bytes"] == owners["parameters"]["estimate_bytes"] == parameters
    assert owners["optimizer"]["held_bytes"] == 2 * parameters + 4 * (
        2 * DEPTH + 2
    )  # AdamW's two averages, and a count of each parameter
    assert (snapshot["step"], snapshot["phase"]) == (4, "in forward")
    assert snapshot["asked_bytes"] == 16 * WIDTH * 4 << 22
    assert snapshot["above_estimate"] == "activations"
    text = next(event.text for event in events if isinstance(event, Document) and event.tells_memory)
    assert "activations" in text and "above its estimate" in text


@pytest.mark.scenario
def test_what_a_worker_was_doing_is_told() -> None:
    """As for its forward above: here the evaluation after step 4 has no memory."""
    events = list[Event]()
    more = {"use": "tests.memory_jobs:WideEvaluation", "params": {"after": 3}}
    spec = load_spec({**document(), "job": more, "evaluate": {"every": {"steps": 4}}})
    job, group = load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu"))
    with pytest.raises(ClusterError), memory_watched(events.append, 0, 1):
        fit(spec, job, group, events.append, NoRequests())
    (snapshot,) = snapshots(events)
    assert snapshot["phase"] == "in an evaluation"


def test_activations_are_what_the_graph_keeps() -> None:
    """Of a perceptron, by hand: the output of the first layer after ReLU. With checkpointing nothing but the input is kept, and nothing is recomputed."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    batch = torch.randn(16, 8)
    assert activation_bytes(model(batch).sum(), model, batch) == 16 * 32 * 4
    calls: list[int] = []

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            y: torch.Tensor = model(x)
            return y

    total = checkpoint(Counted(), batch.requires_grad_(), use_reentrant=False).sum()
    assert activation_bytes(total, model, batch) == 0
    assert len(calls) == 1
    total.backward()
    assert list(saved_by(total.grad_fn)) == []


@pytest.mark.scenario
def test_a_tensor_that_the_job_keeps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        memory_snapshot, "killing_limits", lambda: [Limit("a limit", 95 if _KEPT else 0, 100)]
    )
    monkeypatch.setattr(memory_snapshot, "EVERY_S", 0.002)
    _KEPT.clear()
    _KEPT.append(torch.ones(16 * MB))
    (snapshot,) = snapshots(trained(document()))
    largest = max(snapshot["tensors"], key=lambda one: one["bytes"])
    assert largest["owner"] == "other tensors" and largest["bytes"] == 64 * MB
    assert largest["name"] == f"the list '_KEPT' of module {__name__!r}"
    _KEPT.clear()


_KEPT: list[torch.Tensor] = []


@pytest.mark.scenario
def test_tensors_without_memory_are_left_out() -> None:
    """What torch.compile has traced lives on as fake tensors. To ask one of symbolic sizes for its bytes fails, or adds a guard to the program."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kept = mode.from_tensor(
        torch.ones(40, 8), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    )
    assert isinstance(kept.shape[0], torch.SymInt)
    assert not any("FakeTensor" in str(piece) for piece in holdings(None).pieces)
    assert mode.shape_env is not None and not mode.shape_env.guards
    found = Holdings()
    assert found.add("other tensors", "", kept) == 0


def test_a_tensor_that_stands_for_others_has_their_memory() -> None:
    inner = torch.ones(24, dtype=torch.int8)
    found = Holdings()
    assert found.add("parameters", "weight", TwoTensor(inner, inner.clone())) == 48
    assert found.add("other tensors", "", inner) == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes. Error code 12",
            64 * MB,
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", 2 << 30),
        ("Unable to allocate 1.5 MiB for an array", 3 * MB // 2),
        ("out of memory", 0),
    ],
)
def test_what_was_asked_for(text: str, size: int) -> None:
    assert asked_bytes(RuntimeError(text)) == size


@pytest.mark.scenario
def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    """A library that raises a stored exception from a later one closes the circle. Its frames were followed until all memory was gone."""

    def too_long(*_: object) -> None:
        raise AssertionError("the causes are followed for ever")

    first, later = MemoryError("out of memory"), RuntimeError("the batch failed")
    first.__cause__, later.__cause__ = later, first
    told: list[Event] = []
    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(
        signal.ITIMER_VIRTUAL, 20.0
    )  # of this process alone: a look at all of its objects takes seconds
    try:
        assert asked_bytes(later) == 0
        with pytest.raises(ClusterError), memory_watched(told.append, 0, 1):
            raise first
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    assert [item["asked_bytes"] for item in snapshots(told)] == [0]


# --- limits -----------------------------------------------------------------------------------------------


NEW, OLD = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def group(folder: Path, most: str, used: int, files: int, names: tuple[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {files}\n")


@pytest.mark.parametrize(
    ("line", "below", "names"),
    [("0::/pod/run", "pod", NEW), ("0::/", "", NEW), ("4:cpu,memory:/pod/run", "memory/pod", OLD)],
)
def test_the_limit_of_a_container_counts(
    tmp_path: Path, line: str, below: str, names: tuple[str, str]
) -> None:
    own = tmp_path / "cgroup"
    own.write_text(f"1:name=systemd:/elsewhere\n{line}\n")
    group(tmp_path / below, str(1000 * MB), 700 * MB, 100 * MB, names)
    group(tmp_path / below / "run", "max", 700 * MB, 0, names)
    (limit,) = group_limits(tmp_path, own)
    assert (limit.used, limit.bound, limit.share) == (600 * MB, 1000 * MB, 0.6)


def test_without_control_groups_only_the_machine_counts(tmp_path: Path) -> None:
    assert list(group_limits(tmp_path, tmp_path / "none")) == []


def test_rays_memory_monitor_is_a_limit() -> None:
    def machine(**environment: str) -> int:
        return list(killing_limits(environment))[-1].bound

    assert machine(RAY_ADDRESS="x") == int(machine() * 0.95)
    assert machine(RAY_memory_usage_threshold="0.5") == int(machine() * 0.5)
    assert machine(RAY_memory_monitor_refresh_ms="0") == machine()


# --- whole commands ---------------------------------------------------------------------------------------


def command(tmp_path: Path, before: Callable[[], None], *words: str) -> subprocess.CompletedProcess[str]:
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(document(after=3)))
    return subprocess.run(
        [sys.executable, "-m", "lockstep", "train", str(spec), "--local", f"checkpoint.storage={tmp_path}/runs", *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}", "PYTHONHASHSEED": "0"},
        capture_output=True, text=True, preexec_fn=before, timeout=300, check=False,
    )  # fmt: skip


def record(tmp_path: Path) -> Path:
    (folder,) = (path.parent for path in tmp_path.glob("runs/*/spec.yaml"))
    return folder


@pytest.mark.scenario
def test_a_run_whose_first_micro_batch_does_not_fit_is_recorded_with_what_it_held(tmp_path: Path) -> None:
    """Before the first step nothing of a run exists; for this it begins."""
    done = command(tmp_path, lambda: None, "job.params.after=0", f"job.params.wide={1 << 22}")
    assert done.returncode == 1, done.stderr
    assert "before training" in done.stderr
    text = (record(tmp_path) / "memory-attempt-1-rank-0.txt").read_text()
    assert "before the first step" in text or "in forward" in text
    assert "asked for" in text


@pytest.mark.scenario
def test_a_run_whose_address_space_is_full_leaves_a_snapshot(tmp_path: Path) -> None:
    measure = "import psutil, torch; print(psutil.Process().memory_info().vms)"
    libraries = int(
        subprocess.check_output([sys.executable, "-c", measure])
    )  # 0.6 GiB, or 3 where torch is built for CUDA
    limit = libraries + (7 << 29)

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = command(tmp_path, before, "job.params.wide=40000")
    assert done.returncode == 1, done.stderr
    folder = record(tmp_path)
    line = done.stderr.splitlines()[-1]
    assert "memory-attempt-1-rank-0.txt has the rest" in line and "rank 0 held" in line, done.stderr
    assert "memory-attempt-1-rank-0.txt" in (folder / "error.txt").read_text()
    text = (folder / "memory-attempt-1-rank-0.txt").read_text()
    assert "ulimit -v" in text
    assert re.search(r"^activations +[\d.]+ GiB .*<- above its estimate$", text, re.M), text
    assert re.search(r"^ +[\d.]+ MiB  2$", text, re.M), text
    shown = subprocess.run(
        [sys.executable, "-m", "lockstep", "show", folder.name, "--uri", "off", "--storage", str(folder.parent)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert re.search("^memory +rank 0 held", shown, re.M), shown


@pytest.mark.scenario
def test_a_run_that_its_control_group_kills_has_told_what_it_held(tmp_path: Path) -> None:
    """The kernel ends the process with SIGKILL: the snapshot was taken before, and the end that the guardian records names it."""
    with control_group(1 << 30) as folder:
        done = command(
            tmp_path,
            lambda: enter(folder),
            "job.params.kept_mb=10",
            "job.params.pause_s=0.1",
            "length.steps=1000",
        )
        assert done.returncode == -9, done.stderr
    run = record(tmp_path)
    status = json.loads((run / "run.json").read_text())
    assert status["status"] == "FAILED"
    assert "its memory had come near a limit" in status["tags"]["lockstep.error"], status["tags"]
    snapshot = json.loads((run / "memory-attempt-1-rank-0.json").read_text())
    assert any("control group" in limit["what"] for limit in snapshot["limits"])
    assert snapshot["tensors"][0]["name"] == "the list '_kept' of an object of class 'Growing'"
