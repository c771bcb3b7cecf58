"""How many trials a sweep runs at a time, and what each is given: every bundle fits on a node that is there."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.attempts import cluster_capacity
from lockstep.spec.sweep import load_sweep
from lockstep.sweeps.driver import _Driver


def places(
    monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, float]], *, pbt: bool = True, **changes: Any
) -> tuple[int, list[dict[str, float]]]:
    monkeypatch.setattr(cluster_capacity, "node_resources", lambda: nodes)
    monkeypatch.setattr(cluster_capacity, "largest_cluster", lambda: None)
    workers = {"min": changes.pop("workers", 1)}
    driver: Any = object.__new__(_Driver)
    driver.spec = load_sweep(
        {
            "spec": {"job": {"use": "a:B"}, "batch": {"global": 64, "micro": 8}, "workers": workers},
            "space": {"optimizer.lr": {"loguniform": [1e-4, 1e-1]}},
            **({"scheduler": {"name": "pbt", "every_steps": 5}} if pbt else {}),
            **changes,
        }
    )
    found: tuple[int, list[dict[str, float]]] = driver._places()
    return found


@pytest.mark.parametrize(("nodes", "cpus", "population"), [(3, 2.0, 2), (4, 8.0, 3), (1, 4.0, 9)])
def test_a_trial_of_a_population_asks_for_what_a_node_has(
    monkeypatch: pytest.MonkeyPatch, nodes: int, cpus: float, population: int
) -> None:
    concurrency, bundles = places(monkeypatch, [{"CPU": cpus}] * nodes, trials=population)
    assert bundles == [{"CPU": 1.0}]
    assert concurrency == min(population, nodes * int(cpus))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("concurrency", [1, 2, 3, 5])
def test_no_more_trials_of_a_population_fit_than_are_allowed(
    monkeypatch: pytest.MonkeyPatch, concurrency: int, workers: int
) -> None:
    """All of them are asked for at once, so the bundles of the allowed ones leave no room for another."""
    nodes = [{"CPU": 2.0}] * 3
    at_once, bundles = places(monkeypatch, nodes, trials=9, concurrency=concurrency, workers=workers)
    assert bundles == [{"CPU": 1.0}] * len(bundles)
    assert len(bundles) >= workers
    assert 1 <= at_once == 6 // len(bundles) <= concurrency


def test_room_for_trials_is_counted_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    head, gpus = {"CPU": 16.0}, {"CPU": 4.0, "GPU": 8.0}
    each = {"CPU": 1.0, "GPU": 1.0}
    assert places(monkeypatch, [head, gpus], pbt=False, trials=9, workers=2) == (2, [each, each])
