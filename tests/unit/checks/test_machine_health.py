"""Machines are judged by the median and the majority of the fleet; what is measured here is real."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checks import machine_health
from lockstep.checks.machine_health import Link, Vitals, findings, judged, measure, measure_link
from tests.forked import forking
from tests.ports import free_port

SOUND = Vitals(
    "host", {"cpu": 100.0}, {"cpu": ["aa"]}, {"cpu": "a cpu"}, 8_000_000_000, 50_000_000_000, 2e8,
    0.0, 0.01, {"torch": "2.13"}, Link(1e-4, 1e9, 0.1),
)  # fmt: skip


def fleet(**changed: Any) -> dict[str, Vitals]:
    return {"a": SOUND, "b": SOUND, "c": replace(SOUND, **changed), "d": SOUND}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"products_per_s": {"cpu": 69.0}}, "cpu computes 69 matrix products a second, the median is 100"),
        ({"digests": {"cpu": ["aa", "ab"]}}, "cpu computes one matrix product in 2 ways"),
        ({"digests": {"cpu": ["ab"]}}, "cpu computes another matrix product than 3 of 4 a cpu"),
        ({"disk_free_bytes": 1000}, "1000 B are free on the disk of the runs"),
        ({"disk_bytes_per_s": 0.0}, "the disk of the runs cannot be written"),
        ({"clock_offset_s": -7.5}, "its clock differs from the driver's by -7.5 s"),
        ({"versions": {"torch": "2.12"}}, "torch is 2.12, on 3 of 4 machines 2.13"),
        ({"link": Link(1e-4, 1e8, 0.1)}, "its link carries 95.4 MiB/s, the median is 953.7 MiB/s"),
        ({"problem": "it did not answer"}, "it did not answer"),
    ],
)
def test_a_machine_that_is_slow_or_wrong_is_named(changed: dict[str, Any], why: str) -> None:
    found = judged(fleet(**changed))
    assert {one.node: list(one.unwell) for one in found} == {"a": [], "b": [], "c": [why], "d": []}
    (failed,) = [finding for finding in findings(found) if finding.result == "failure"]
    assert failed.evidence.startswith("c") and why in failed.evidence


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"products_per_s": {"cpu": 71.0}},
        {"clock_offset_s": 1.0},
        {"kinds": {"cpu": "another"}, "products_per_s": {"cpu": 5.0}, "digests": {"cpu": ["other"]}},
        {"link": None},
    ],
)
def test_a_machine_that_is_only_another_is_well(changed: dict[str, Any]) -> None:
    assert not any(one.unwell for one in judged(fleet(**changed)))


def test_less_memory_and_a_slow_disk_are_remarks() -> None:
    found = judged(fleet(available_bytes=1_000_000_000, disk_bytes_per_s=1e6))
    assert [len(one.remarks) for one in found] == [0, 0, 2, 0]
    assert [finding.result for finding in findings(found)] == ["pass", "pass", "warning", "pass"]


def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vitals = measure(tmp_path / "not there yet", seconds=0.1)
    assert vitals.products_per_s["cpu"] > 1 and len(vitals.digests["cpu"]) == 1
    assert vitals.disk_bytes_per_s > 0 and vitals.available_bytes > 0
    (well,) = judged({"here": vitals})
    assert [reason for reason in well.unwell if "free on the disk" not in reason] == []
    assert "products/s on cpu" in findings([well])[0].evidence


def test_bits_that_change_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that now and then gets another product."""
    calls = 0
    real = torch.equal

    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:
            a.view(torch.int32)[3, 3] ^= 1
        return real(a, b)

    monkeypatch.setattr(torch, "equal", equal)
    monkeypatch.setitem(machine_health.SIZE, "cpu", 32)
    vitals = measure(tmp_path, seconds=0.1)
    assert len(vitals.digests["cpu"]) == 2
    assert judged({"here": vitals})[0].unwell[0] == "cpu computes one matrix product in 2 ways"


def linked(rank: int, port: int, answers: Any) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, 3, is_master=rank == 0, timeout=timedelta(seconds=60))
    answers.put((rank, measure_link(rank, 3, store)))


def test_links_are_measured_by_all_at_once() -> None:
    """Three processes over gloo: each but the first has its own link, and all have the sum."""
    context = forking()
    answers: Any = context.Queue()
    port = free_port()
    processes = [context.Process(target=linked, args=(rank, port, answers)) for rank in range(3)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert found[0].bytes_per_s == 0 and all(
        found[rank].bytes_per_s > 0 < found[rank].delay_s for rank in (1, 2)
    )
    assert all(link.all_reduce_s > 0 for link in found.values())
