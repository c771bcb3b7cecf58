"""A store that misbehaves in part, as a proxy before a real tracking server does: each kind of call has its own verdict."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RecordError
from lockstep.record import problems
from lockstep.record.events.union import Document, Finished
from lockstep.record.mirror.delivery_lanes import Lane
from lockstep.record.mirror.sync import sync
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.raised import raises
from tests.unit.record.proxy import Proxy
from tests.unit.record.rows import evaluation_row, step_row
from tests.unit.record.server import Server
from tests.unit.record.test_outage import expected, recorded

Specs = Callable[..., Spec]
BIG = "stacks-attempt-1.txt"


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # holds for what the test itself asks as well
    monkeypatch.setattr("lockstep.record.writer.FLUSH_S", 0.05)
    monkeypatch.setattr("lockstep.record.mirror.reconciler.BEAT_S", 0.2)
    with Proxy(server.port, silence_s=11.0) as proxy:
        yield proxy


def run_of(uri: str, run_id: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri).get_run(run_id)


def artifacts(uri: str, run_id: str) -> set[str]:
    from mlflow import MlflowClient

    return {file.path for file in MlflowClient(tracking_uri=uri).list_artifacts(run_id)}


def wait_until(happened: Callable[[], bool], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def heard(uri: str, run_id: str) -> float:
    return float(run_of(uri, run_id).data.tags["lockstep.heartbeat"])


def check(uri: str, folder: Path, steps: int) -> None:
    """MLflow has the points of each step, once."""
    found = recorded(uri, folder.name)
    for key, points in expected([step_row(i) for i in range(1, steps + 1)]).items():
        assert found[key] == points, key


@pytest.mark.scenario
def test_one_file_that_is_too_large_costs_nothing_else(server: Server, proxy: Proxy, spec: Specs) -> None:
    """413 for good on one artifact: told at once, while metrics, heartbeat and other files go on; `record sync` sends it later."""
    proxy.judge = lambda method, path, number: "413" if BIG in path else ""
    recorder = Recorder(spec(proxy.uri))
    recorder.start()
    run_id = recorder.run_id()
    recorder.tell(step_row(1), Document(BIG, "a long text"))
    wait_until(lambda: recorder.state.failure is not None)
    assert BIG in str(recorder.state.failure) and "413" in str(recorder.state.failure)
    assert f"lockstep record sync {run_id}" in str(recorder.state.failure)
    recorder.tell(*[step_row(i) for i in range(2, 31)], Document("after.txt", "later"))
    wait_until(lambda: len(recorded(server.uri, run_id).get("train/loss", [])) == 30)
    wait_until(lambda: "after.txt" in artifacts(server.uri, run_id))
    wait_until(lambda: BIG in run_of(server.uri, run_id).data.tags.get("lockstep.record_error", ""))
    before = heard(server.uri, run_id)
    wait_until(lambda: heard(server.uri, run_id) > before)
    recorder.tell(Finished({"step": 30}))
    with raises(problems.NOT_RECORDED, got=re.compile("413")):
        recorder.close()
    folder = recorder.run_folder()
    assert run_of(server.uri, run_id).info.status == "FINISHED"
    assert BIG in run_of(server.uri, run_id).data.tags["mlflow.note.content"].splitlines()[0]
    assert "413" in (folder / "log.txt").read_text()
    assert BIG not in artifacts(server.uri, run_id)
    check(server.uri, folder, 30)
    proxy.reset()
    assert sync(folder).sent
    assert BIG in artifacts(server.uri, run_id)
    assert run_of(server.uri, run_id).data.tags["lockstep.record_error"] == ""
    assert not sync(folder).sent
    check(server.uri, folder, 30)


def test_the_reason_of_a_refusal_is_told_though_its_next_try_hangs(proxy: Proxy, spec: Specs) -> None:
    """413 on one artifact, and no answer when it is tried once more at the end: what the store has said is what a person learns."""
    answers = iter(["413"])
    proxy.judge = lambda method, path, number: next(answers, "timeout") if BIG in path else ""
    recorder = Recorder(spec(proxy.uri))
    recorder.start()
    recorder.tell(step_row(1), Document(BIG, "a long text"))
    wait_until(lambda: recorder.state.failure is not None)
    recorder.tell(Finished({"step": 1}))
    with raises(problems.NOT_SENT, got=re.compile("413"), count=1):
        recorder.close(timeout_s=2.0)
    assert proxy.faults == 2


SLOW = pytest.mark.exact  # the full product


@pytest.mark.parametrize("fault", ["401", pytest.param("403", marks=SLOW), pytest.param("404", marks=SLOW)])
def test_metrics_go_on_when_a_token_or_a_proxy_is_right_again(
    server: Server, proxy: Proxy, spec: Specs, fault: str
) -> None:
    """Refused on log-batch alone for a while: told at once, nothing lost, nothing doubled, and the run ends well."""
    broken = threading.Event()
    proxy.judge = lambda method, path, number: fault if broken.is_set() and "log-batch" in path else ""
    recorder = Recorder(spec(proxy.uri))
    recorder.start()
    run_id = recorder.run_id()
    recorder.tell(*[step_row(i) for i in range(1, 11)])
    wait_until(lambda: len(recorded(server.uri, run_id).get("train/loss", [])) == 10)
    broken.set()
    recorder.tell(*[step_row(i) for i in range(11, 21)], Document("meanwhile.txt", "text"))
    wait_until(lambda: recorder.state.failure is not None)
    assert fault in str(recorder.state.failure) or "Forbidden" in str(recorder.state.failure)
    wait_until(lambda: "meanwhile.txt" in artifacts(server.uri, run_id))
    broken.clear()
    wait_until(lambda: recorder.state.failure is None)
    recorder.tell(*[step_row(i) for i in range(21, 31)], Finished({"step": 30}))
    recorder.close()
    assert run_of(server.uri, run_id).info.status == "FINISHED"
    assert run_of(server.uri, run_id).data.tags.get("lockstep.record_error", "") == ""
    check(server.uri, recorder.run_folder(), 30)
    assert not sync(recorder.run_folder()).sent


@pytest.mark.scenario
def test_the_heartbeat_waits_for_no_upload(server: Server, proxy: Proxy, spec: Specs) -> None:
    """A file whose server hangs: the process is heard all the same."""
    proxy.silence_s = 120.0
    proxy.judge = lambda method, path, number: "timeout" if BIG in path else ""
    recorder = Recorder(spec(proxy.uri))
    recorder.start()
    run_id = recorder.run_id()
    recorder.tell(Document(BIG, "text"))
    wait_until(lambda: proxy.faults > 0)
    before = heard(server.uri, run_id)
    wait_until(lambda: heard(server.uri, run_id) > before + 1, timeout_s=60.0)
    proxy.reset()
    recorder.tell(Finished({"step": 0}))
    recorder.close()
    assert BIG in artifacts(server.uri, run_id)


@pytest.mark.scenario
@pytest.mark.usefixtures("drawn_figures")
@pytest.mark.parametrize(
    "fault",
    ["lost", *(pytest.param(fault, marks=SLOW) for fault in ("reset", "timeout", "429", "500", "503"))],
)
def test_a_call_whose_answer_is_lost_leaves_no_double(
    server: Server, proxy: Proxy, spec: Specs, fault: str
) -> None:
    """Each request fails once, its repetition passes: one run, each point once, each file once."""
    seen: set[tuple[str, str]] = set()
    failed: list[str] = []

    def once(method: str, path: str, number: int) -> str:
        if method == "GET" or "/runs/create" in path:
            return ""
        if (method, path) in seen:
            return ""
        seen.add((method, path))
        failed.append(path)
        return fault

    proxy.judge = once
    recorder = Recorder(spec(proxy.uri))
    recorder.start()
    recorder.tell(*[step_row(i) for i in range(1, 21)], evaluation_row(20), Finished({"step": 20}))
    recorder.close()
    assert len(failed) > 10
    folder = recorder.run_folder()
    check(server.uri, folder, 20)
    assert run_of(server.uri, folder.name).info.status == "FINISHED"
    assert json.loads((folder / "summary.json").read_text()) == {"step": 20}


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("counted", [True, False], ids=["", "a backlog is one silent call"])
def test_a_backlog_is_sent_though_every_fifth_answer_is_lost(
    server: Server, proxy: Proxy, spec: Specs, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """Replies to log-batch were lost after the server had acted (mlflow#24577): the pauses grew over the whole backlog, and its end was not waited for.

    The negative control does not hear of the batches that the store took: FINISHED is not told then.
    """
    monkeypatch.setattr("lockstep.record.mirror.metric_batches.POINTS_PER_CALL", 10)
    if not counted:
        monkeypatch.setattr(Lane, "answered", lambda lane: None)
    calls = [0]
    held = threading.Event()

    def fifth(method: str, path: str, number: int) -> str:
        if method == "GET" or "log-batch" not in path:
            return ""
        if not held.is_set():
            return "503"
        calls[0] += 1
        return "" if calls[0] % 5 else "lost"

    proxy.judge = fifth
    recorder = Recorder(spec(proxy.uri), patience_s=1.0)
    recorder.start()
    recorder.tell(*[step_row(i) for i in range(1, 61)], Finished({"step": 60}))
    held.set()
    if counted:
        recorder.close(timeout_s=40.0)  # pauses that grow from answer to answer would take longer
        assert calls[0] > 60
        assert run_of(server.uri, recorder.run_id()).info.status == "FINISHED"
        check(server.uri, recorder.run_folder(), 60)
        return
    with raises(problems.NOT_SENT):
        recorder.close(timeout_s=1.0)
    found = run_of(server.uri, recorder.run_id())
    assert len(recorded(server.uri, recorder.run_id())["train/loss"]) < 60
    assert found.info.status == "RUNNING"
    proxy.reset()
    assert sync(recorder.run_folder()).sent
    check(server.uri, recorder.run_folder(), 60)
    assert run_of(server.uri, recorder.run_id()).info.status == "FINISHED"


def test_a_creation_whose_answer_is_lost_is_found_again(server: Server, proxy: Proxy, spec: Specs) -> None:
    """One run, not two, and not none."""
    from mlflow import MlflowClient

    lost: list[str] = []

    def once(method: str, path: str, number: int) -> str:
        if "/runs/create" in path and not lost:
            lost.append(path)
            return "lost"
        return ""

    proxy.judge = once
    document = spec(proxy.uri)
    named = document.model_copy(update={"name": "created-once"})
    recorder = Recorder(named)
    recorder.start()
    recorder.tell(step_row(1), Finished({"step": 1}))
    recorder.close()
    client = MlflowClient(tracking_uri=server.uri)
    experiment = client.get_run(recorder.run_id()).info.experiment_id
    found = client.search_runs([experiment], "attributes.run_name = 'created-once'")
    assert lost and [run.info.run_id for run in found] == [recorder.run_id()]
    assert found[0].info.status == "FINISHED"


def test_one_point_that_is_refused_costs_no_other(server: Server, proxy: Proxy, spec: Specs) -> None:
    """MLflow takes no step beyond 64 bits: that row is set aside, all others are there, and it is told."""
    recorder = Recorder(spec(proxy.uri))
    recorder.start()
    run_id = recorder.run_id()
    bad = step_row(11, wall_clock=1e300)
    recorder.tell(*[step_row(i) for i in range(1, 11)], bad, *[step_row(i) for i in range(12, 31)])
    wait_until(lambda: recorder.state.failure is not None)
    assert "step 11" in str(recorder.state.failure)
    recorder.tell(Finished({"step": 30}))
    with pytest.raises(RecordError):
        recorder.close()
    steps = [step for step, _, _ in recorded(server.uri, run_id)["train/loss"]]
    assert steps == [i for i in range(1, 31) if i != 11]
    assert run_of(server.uri, run_id).data.tags["lockstep.record_error"] != ""
