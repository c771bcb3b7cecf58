"""What the driver of a sweep, and the workers of a trial, ask of the recorders and of each other, on Ray."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from lockstep.checkpoint.runs.names import run_of_name
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.clusters.bounded_calls import within
from lockstep.clusters.problems import UNANSWERED
from lockstep.driver.run_view import RunView
from lockstep.record.events.union import Warned
from lockstep.record.mirror.stores import find_run
from lockstep.spec.fields import Faults
from lockstep.spec.loading import load_spec
from lockstep.sweeps import trial, trial_watchdog
from lockstep.sweeps.recorders import GOES_ON, WHOSE, recorders_here
from lockstep.sweeps.trial import Training, run_name
from lockstep.sweeps.trial_rendezvous import TrialRendezvous, TrialRendezvousClient
from lockstep.sweeps.trial_watchdog import SweepWatchdog
from lockstep.sweeps.trial_workers import Peer
from lockstep.training.elastic.membership import Arrival, Formation, Progress, Refused
from tests.distributed.training import Document, train
from tests.raised import raises

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray leaves sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

AT = Progress(7, 5)


class Recorders:
    """Has the rendezvous of a trial of two workers, and says how the trials stand once it is let."""

    def __init__(self) -> None:
        self._rendezvous, self._let = TrialRendezvous(4, 2, lambda _: None), threading.Event()
        self._asked = 0

    @ray.method(concurrency_group="ask")
    def ask_rendezvous(self, key: str, attempt: int, name: str, *arguments: Any) -> Any:
        assert (key, attempt) == ("3", 4)
        return getattr(self._rendezvous, name)(*arguments)

    @ray.method(concurrency_group="views")
    def views(self) -> dict[int, RunView]:
        self._asked += 1
        self._let.wait()
        return {3: RunView(attempt=self._asked)}

    def let(self) -> None:
        self._let.set()

    def fail(self) -> None:
        raise ZeroDivisionError


@pytest.fixture
def recorders(cluster: None) -> Iterator[Any]:
    actor = started()
    yield actor
    ray.kill(actor)


def started() -> Any:
    """The actor; each group of its methods answers in the order of the calls."""
    return ray.remote(num_cpus=0, concurrency_groups={"ask": 1, "views": 1})(Recorders).remote()


def test_a_worker_is_answered_by_the_rendezvous_of_its_trial(recorders: Any) -> None:
    first, second = (TrialRendezvousClient(recorders, "3", 4, worker) for worker in (0, 1))
    first.ready()
    second.ready()
    assert first.called() is None
    assert first.lose(1)
    assert first.called() == 4
    assert first.ask(4) is None
    first.arrive(4, Arrival(AT, "host", 10))
    assert first.ask(4) == Formation(5, (0,), "host", 10, AT)
    first.end()
    assert isinstance(first.ask(5), Refused)


def test_the_watchdog_waits_for_no_answer_and_hears_each_once(
    recorders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It watches several trials, and the driver has more to do. Recorders that stay silent end the sweep."""
    watchdog = SweepWatchdog(recorders, Faults())
    waits = threading.Timer(5.0, lambda: recorders.let.remote())
    waits.start()
    assert [watchdog._views() for _ in range(3)] == [{}] * 3
    assert waits.is_alive(), "it has waited for the answer"
    waits.cancel()
    with monkeypatch.context() as patch, raises(UNANSWERED, whose=WHOSE, seconds="0", advice=GOES_ON):
        patch.setattr(trial_watchdog, "NEWS_S", 0.1)
        time.sleep(0.2)
        watchdog._views()
    recorders.let.remote()
    heard = list[int]()
    until = time.monotonic() + 30
    while len(heard) < 2:
        assert time.monotonic() < until
        heard += [view.attempt for view in watchdog._views().values()]
    assert heard == [1, 2]


def without_thread() -> Any:
    """A trial that trains nothing."""
    training: Any = Training.__new__(Training)
    training.number, training.results, training._outlived = 3, queue.SimpleQueue(), False
    return training


@pytest.mark.parametrize("over", [False, True])
def test_a_trial_that_waits_for_a_rank_which_has_ended_is_begun_again(
    recorders: Any, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """Where rank 0 finds out by itself in time, that is what it tells."""
    monkeypatch.setattr(trial, "PATIENCE_S", 30.0 if over else 0.1)
    training, is_over, told = without_thread(), threading.Event(), list[str]()
    training._rank_zero = SimpleNamespace(broke=told.append)
    training._others = {1: recorders.fail.remote()}
    client = TrialRendezvousClient(recorders, "3", 4, 0)
    watching = threading.Thread(target=training._watch, args=(client, is_over), daemon=True)
    watching.start()
    if over:
        time.sleep(0.5)
        is_over.set()
    watching.join(20)
    assert not watching.is_alive()
    if over:
        assert training.results.empty() and not told
    else:
        assert training.results.get(timeout=20)["lost"].startswith("a worker of the trial")
        assert len(told) == 1 and told[0].startswith("a worker of the trial"), told


@pytest.mark.parametrize("lost", [True, False])
def test_the_others_go_on_without_a_rank_whose_process_is_lost(recorders: Any, lost: bool) -> None:
    """Not without one that has ended with an error of its own: that is the trial's."""
    training, told = without_thread(), list[Any]()
    training._rank_zero = SimpleNamespace(tell=told.append)
    client = TrialRendezvousClient(recorders, "3", 4, 0)
    for worker in (0, 1):
        TrialRendezvousClient(recorders, "3", 4, worker).ready()
    actor = started()
    work = actor.views.remote() if lost else recorders.fail.remote()
    ray.kill(actor)
    training._others = {1: work, 2: recorders.let.remote()}
    with pytest.raises(ray.exceptions.RayError) as raised:
        ray.get(work, timeout=60)
    assert training._outlives(client, 1, raised.value) is training._outlived is lost
    assert [*training._others] == ([2] if lost else [1, 2])
    assert [isinstance(event, Warned) and "rank 1 of trial 3 was lost" in event.text for event in told] == (
        [True] if lost else []
    )


def evaluated_twice(folder: Path) -> Document:
    return {
        "job": {"use": "tests.unit.training.test_loop:Evaluated", "params": {"samples": 16}},
        "batch": {"global": 8, "micro": 2},
        "length": {"steps": 4},
        "evaluate": {"every": {"steps": 2}},
        "rehearsal": "off",
        "record": {"uri": "off"},
        "checkpoint": {"storage": str(folder / "runs"), "every": None},
    }


def next_of(training: Training) -> dict[str, Any]:
    return within(60.0, "the trial", training.next_result)


def given(training: Training) -> list[tuple[Any, ...]]:
    """What Tune is given of a trial until it ends."""
    results = [next_of(training)]
    while not results[-1].get("done"):
        results.append(next_of(training))
    return [(one["step"], one.get("status"), one.get("weights_digest"), one["run_id"]) for one in results]


def test_each_attempt_of_a_trial_finds_its_run_and_a_finished_run_stands_for_another(tmp_path: Path) -> None:
    """In the process of the test: what Tune is given of a trial that is trained, begun again, replayed and reused."""
    document = evaluated_twice(tmp_path)
    spec, digest = load_spec(document), train(document).weights_digest
    name = run_name("sweep", 0, spec)

    def began(number: int, *, may_reuse: bool = False) -> Training:
        return Training(spec, number, "sweep", recorders, [], tmp_path, None, may_reuse=may_reuse)

    with recorders_here(2, lambda _: None) as recorders:
        left = began(0)
        assert next_of(left)["step"] == 2
        assert left.leave()
        shutil.rmtree(tmp_path / "runs" / f"named-{name}")  # as if it had been lost before it gave the name
        trained = given(began(0))
        run_id = left.run_id
        assert trained[-1] == (4, "finished", digest, run_id)
        assert run_of_name(LocalStorage(tmp_path / "runs"), name) == run_id
        until = time.monotonic() + 60
        while find_run("off", run_id, spec.folder).status != "FINISHED":  # its recorder is being closed
            assert time.monotonic() < until
            time.sleep(0.02)
        assert given(began(0)) == [(2, None, None, run_id), (4, "finished", digest, run_id)]
        *_, reused = given(began(1, may_reuse=True))
        assert reused[:3] == (4, "reused", digest) and reused[3] != run_id


def test_a_trial_outlives_a_worker_that_is_lost_while_tune_decides(tmp_path: Path) -> None:
    """The rendezvous knows of all three workers, and hears of the loss from the watch over them. The next trial needs others."""
    document = evaluated_twice(tmp_path)
    peers = [ray.remote(Peer).remote(str(tmp_path), None) for _ in range(2)]
    with recorders_here(2, lambda _: None) as recorders:
        training = Training(
            load_spec(document), 0, "sweep", recorders, peers, tmp_path, None, may_reuse=False
        )
        assert next_of(training)["step"] == 2
        ray.kill(peers[0])
        assert given(training) == [(4, "finished", train(document).weights_digest, training.run_id)]
        assert not training.leave()
    ray.kill(peers[1])


@pytest.mark.parametrize(
    ("others", "outlived", "all_there"),
    [
        ([], False, True),
        (["ended", "failed"], False, True),  # a process whose work has failed is there for the next trial
        (["ended", "lost"], False, False),
        (["ended", "silent"], False, False),
        (["ended"], True, False),
    ],
    ids=["none", "all there", "lost", "silent", "outlived"],
)
def test_the_next_trial_is_told_whether_its_peers_are_all_there(
    recorders: Any, monkeypatch: pytest.MonkeyPatch, others: list[str], outlived: bool, all_there: bool
) -> None:
    monkeypatch.setattr(trial, "PATIENCE_S", 0.5 if "silent" in others else 60.0)
    works = {name: recorders.let.remote() if name == "ended" else None for name in others}
    if "failed" in works:
        works["failed"] = recorders.fail.remote()
    if "silent" in works:
        works["silent"] = started().views.remote()
    if "lost" in works:
        actor = started()
        works["lost"] = actor.views.remote()
        ray.kill(actor)
    training, left = without_thread(), list[bool]()
    training._rank_zero = SimpleNamespace(leave=lambda: left.append(True))
    training._thread = threading.Thread(target=lambda: None)
    training._thread.start()
    training._others, training._outlived = dict(enumerate(works.values(), start=1)), outlived
    assert training.leave() is all_there
    assert left == [True]
