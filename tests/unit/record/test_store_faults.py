"""Each request to a real tracking server fails, once or for good, and is lost on the way or on the way back: no record lies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RecordError
from lockstep.record.recorder import Recorder
from lockstep.spec.fields import Spec
from tests.unit.record.failed_at_every_call import (
    POINTS,
    Event,
    not_whole,
    quick,
    recorded,
    saved,
    waves,
)
from tests.unit.record.proxy import FAULTS, Proxy
from tests.unit.record.server import Server

Requests = tuple[str, int, str, bool]
"""Scenario, number of the request, fault, and whether all later ones to its path fail as well."""


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    with quick(), Proxy(server.port, silence_s=1.3) as proxy:
        yield proxy


def judge_of(at: int, fault: str, lasts: bool) -> Callable[[str, str, int], str]:
    failed: list[str] = []

    def judge(method: str, path: str, number: int) -> str:
        path = path.partition("?")[0]
        if number == at:
            failed.append(path)
        return fault if number == at or (lasts and path in failed) else ""

    return judge


def told(scenario: str) -> list[list[Event]]:
    """Without checkpoints, which are models in MLflow: they have tests of their own."""
    return [
        [event for event in wave if event.__class__ is not saved(1).__class__] for wave in waves(scenario)
    ]


def in_mlflow(server: Server, run_id: str) -> tuple[Any, list[tuple[str, int]]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=server.uri)
    run = client.get_run(run_id)
    keys = [key for key in run.data.metrics if key.startswith(("train/", "eval/"))]
    return run, sorted((key, point.step) for key in keys for point in client.get_metric_history(run_id, key))


WANTED = [point for point in POINTS if point[0].startswith(("train/", "eval/"))]


def lies(server: Server, proxy: Proxy, spec: Spec, case: Requests) -> list[str]:
    """What is untrue in MLflow after a case, and after its resume."""
    scenario, at, fault, lasts = case
    first = None
    proxy.reset()
    if scenario == "resumed":
        recorder = Recorder(spec)
        assert not recorded(recorder, told("new")[:2])
        first = recorder.run_id()
    proxy.reset(judge_of(at, fault, lasts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        recorder = Recorder(spec, run_id=first, patience_s=0.05)
        failure = recorded(recorder, told(scenario), timeout_s=0.5)
    proxy.reset()
    found = []
    if recorder.state.run_id is not None:
        first = recorder.run_id()
        run, points = in_mlflow(server, first)
        whole = points == WANTED and not not_whole(recorder.run_folder(), None)
        state, error = run.info.status, run.data.tags.get("lockstep.record_error")
        if not failure and not (whole and state == "FINISHED"):
            found.append(f"it ended well, is {state} and {'whole' if whole else 'not whole'}")
        if state == "FINISHED" and not whole and not error:
            found.append("FINISHED, but not whole")
    if first is None:
        return found if failure else [*found, "it neither started nor failed"]
    try:
        again = Recorder(spec, run_id=first)
        failure = recorded(again, told("resumed"))
    except RecordError as error:
        failure = str(error)
    run, points = in_mlflow(server, first)
    if failure or points != WANTED or not_whole(again.run_folder(), None) or run.info.status != "FINISHED":
        found.append(
            f"resumed: {failure or 'no failure'}, {run.info.status}, {len(points)} points of {len(WANTED)}"
        )
    return found


def cases(server: Server, proxy: Proxy, spec: Spec) -> list[Requests]:
    found = []
    for scenario in ("new", "resumed"):
        proxy.reset()
        first = None
        if scenario == "resumed":
            recorder = Recorder(spec)
            assert not recorded(recorder, told("new")[:2])
            first = recorder.run_id()
            proxy.reset()
        assert not recorded(Recorder(spec, run_id=first), told(scenario))
        count = len(proxy.requests)
        found += [
            (scenario, at, fault, lasts) for at in range(count) for fault in FAULTS for lasts in (False, True)
        ]
    random.Random(16).shuffle(found)
    return found


def test_some_faults_of_a_server_leave_no_lie(
    server: Server, proxy: Proxy, spec: Callable[..., Spec], tmp_path: Path
) -> None:
    """Two of them: the cover; `make exact` has three hundred."""
    uri = proxy.uri
    chosen = cases(server, proxy, spec(uri))[:2]
    assert {case: wrong for case in chosen if (wrong := lies(server, proxy, spec(uri), case))} == {}


@pytest.mark.exact
def test_no_fault_of_a_server_leaves_a_lie(
    server: Server, proxy: Proxy, spec: Callable[..., Spec], tmp_path: Path
) -> None:
    """Three hundred of them, as a seed has chosen: ten minutes."""
    chosen = cases(server, proxy, spec(proxy.uri))[:300]
    wrong = {case: found for case in chosen if (found := lies(server, proxy, spec(proxy.uri), case))}
    print(f"{len(chosen)} cases, {len(wrong)} lies")
    assert wrong == {}
