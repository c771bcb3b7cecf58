"""What a run asks its cluster for, as the autoscaler reads it in the GCS.

Ray's own fake autoscaling cluster does not start from the wheel (2.60), so no node is added here: what is shown is that the
requests arrive, that they end, and that a run grows when room comes (test_supervisor.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

from lockstep.attempts import problems
from lockstep.spec.loading import load_spec
from tests.raised import raises

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


def demand() -> Counter[float]:
    """The CPUs of each bundle that the GCS tells an autoscaler is waited for."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    found = Counter[float]()
    for group in status.resource_demands.placement_group_demand:
        for request in group.bundles_by_count:
            found[request.bundle["CPU"]] += request.count
    return found


def settles(look: Callable[[], object], wanted: object) -> None:
    until = time.monotonic() + 150  # a busy machine
    while (found := look()) != wanted:
        assert time.monotonic() < until, found
        time.sleep(0.1)


def test_what_is_asked_for_reaches_the_autoscaler_and_is_taken_back() -> None:
    from lockstep.attempts.demand import RoomRequest

    before = demand()
    request = RoomRequest()
    try:
        request.want(3, {"CPU": 64.0})
        settles(lambda: demand() - before, Counter({64.0: 3}))
        request.want(1, {"CPU": 64.0})
        settles(lambda: demand() - before, Counter({64.0: 1}))
        other = RoomRequest()
        other.want(1, {"CPU": 96.0}, together=2)  # another run's: both count
        settles(lambda: demand() - before, Counter({64.0: 1, 96.0: 2}))
        other.release()
    finally:
        request.release()
    settles(lambda: demand() - before, Counter())


def test_room_that_comes_is_left_free_for_the_run_to_grow_into(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from lockstep.attempts.demand import RoomRequest

    monkeypatch.setattr("lockstep.attempts.demand.REST_S", 1e6)
    request = RoomRequest()

    def free_after_asking() -> float | None:
        request.want(1, {"CPU": 1.0})
        return ray.available_resources().get("CPU")

    try:
        request.want(1, {"CPU": 1.0})  # there is room for it
        settles(lambda: ray.available_resources().get("CPU"), 3.0)
        settles(free_after_asking, 4.0)
        assert free_after_asking() == 4.0  # and is not asked for at once again
    finally:
        request.release()


def test_an_attempt_asks_for_the_workers_that_it_could_have_and_has_not() -> None:
    """Two of six, of more CPUs each than a node has; nothing once it has as many as it can use."""
    from lockstep.attempts.cluster_capacity import can_grow
    from lockstep.attempts.placement import WorkerPlacement
    from lockstep.attempts.resizing import Resizing

    document = {
        "job": {"use": "jobs.digits.job:Digits"},
        "batch": {"global": 192, "micro": 32},
        "workers": {"min": 2, "max": 8, "cpus_each": 64},
        "record": {"uri": "off"},
    }
    spec, before = load_spec(document), demand()
    place = WorkerPlacement(2, {"CPU": 64.0}, frozenset(), frozenset())
    watch = Resizing(spec, place)
    watch.advice([])
    settles(lambda: demand() - before, Counter({64.0: 4}))
    watch.close()
    settles(lambda: demand() - before, Counter())
    whole = Resizing(spec, place._replace(workers=6))
    whole.advice([])
    assert demand() - before == Counter()
    assert not can_grow(spec)  # this cluster has no autoscaler: too few workers are refused at once


@pytest.mark.scenario
def test_room_between_attempts_is_waited_for_as_long_as_the_spec_allows() -> None:
    """It is asked for meanwhile, and the run says what it waits for."""
    from lockstep.attempts.first_placement import next_place
    from lockstep.driver.signals import StopSignal

    said = []

    def say(text: str) -> None:
        said.append(text)
        settles(lambda: demand() - before, Counter({64.0: 2}))

    document = {
        "job": {"use": "jobs.digits.job:Digits"},
        "batch": {"global": 192, "micro": 32},
        "workers": {"min": 2, "max": 8, "cpus_each": 64},
        "record": {"uri": "off"},
        "faults": {"wait_for_workers_s": 3.0},
    }
    before = demand()
    began = time.monotonic()
    with raises(problems.WAITED, seconds=3):
        next_place(load_spec(document), frozenset(), StopSignal(), say)
    assert time.monotonic() - began >= 3.0
    (line,) = said
    assert line.startswith("waiting for workers: workers.min: got 2 workers of 64 CPU each")
    assert line.endswith("; the cluster is asked for 2 of 64 CPU each")
    settles(lambda: demand() - before, Counter())
