"""The tables of docs/scaling.md count what is really sent: every collective of a step is counted in gloo processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

import lockstep.training.step.reduction as reduction
from lockstep.communication.group import Group
from lockstep.training.step.step_exchange import Exchange
from tests.benchmarks.scaling import (
    Link,
    Traffic,
    as_markdown,
    efficiency,
    exchange_traffic,
    step_traffic,
    tables,
)
from tests.distributed.pool import Pool
from tests.distributed.training import train_sending

Document = dict[str, Any]


def document(micro_batches: int) -> Document:
    return {
        "job": {
            "use": "tests.distributed.real_jobs:FewDigits",
            "params": {"width": 8, "train_samples": 192, "eval_samples": 8},
        },
        "length": {"steps": 3},
        "batch": {"global": 8 * micro_batches, "micro": 8},
        "workers": {"bucket_mb": 0.004},
        "record": {"uri": "off"},
    }


class Counted(NamedTuple):
    """What one rank sent in the last step: for gradients (with an exchange that rode along), and in an exchange apart."""

    sent: int
    messages: int
    apart: int
    buckets: list[int]
    flags: int
    parts: int


def counted(document: Document, latency_bytes: int) -> Counted:
    seen: list[tuple[str, int, int]] = []
    with _counting(seen):
        train_sending(document, latency_bytes)
    last = max(i for i, (kind, _, _) in enumerate(seen) if kind == "begin")
    step = seen[last:]
    ((flags, parts),) = ((a, b) for kind, a, b in step if kind == "begin")
    return Counted(
        sent=sum(size for kind, size, _ in step if kind == "sent"),
        messages=sum(count for kind, _, count in step if kind == "sent"),
        apart=sum(size for kind, size, _ in step if kind == "exchange"),
        buckets=[size for kind, size, _ in step if kind == "bucket"],
        flags=flags,
        parts=parts,
    )


@contextmanager
def _counting(seen: list[tuple[str, int, int]]) -> Iterator[None]:
    swap, pass_on, send, begin = (
        Group.swap, Group.pass_on, reduction.Reduction._sent, reduction.Reduction.begin
    )  # fmt: skip
    exchange = Exchange.send

    def counts_swap(self: Any, message: Any, lengths: Any, largest: int) -> Any:
        others = self.size - 1 if message.numel() else 0
        seen.append(("sent", others * message.nbytes, others))
        return swap(self, message, lengths, largest)

    def counts_pass_on(self: Any, outgoing: Any, incoming: Any) -> Any:
        parts = [part.numel() * part.element_size() for _, part in outgoing if part.numel()]
        seen.append(("sent", sum(parts), len(parts)))
        return pass_on(self, outgoing, incoming)

    def counts_bucket(self: Any, buffer: Any, indices: Any) -> Any:
        seen.append(("bucket", buffer.numel(), 0))
        return send(self, buffer, indices)

    def counts_step(self: Any, *args: Any) -> None:
        seen.append(("begin", self.exchange.flags, len(self.exchange.parts)))
        begin(self, *args)

    def counts_exchange(self: Any) -> None:
        exchange(self)
        _, *sent = seen.pop()
        seen.append(("exchange", *sent))

    with (
        mock.patch.object(Group, "swap", counts_swap),
        mock.patch.object(Group, "pass_on", counts_pass_on),
        mock.patch.object(reduction.Reduction, "_sent", counts_bucket),
        mock.patch.object(reduction.Reduction, "begin", counts_step),
        mock.patch.object(Exchange, "send", counts_exchange),
    ):
        yield


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("micro_batches", "workers", "latency_bytes"),
    [
        (3, 2, 0),
        (4, 3, 0),
        (8, 4, reduction.LATENCY_BYTES),
        *(pytest.param(*each, 0, marks=pytest.mark.exact) for each in [(4, 2), (6, 3), (8, 4), (6, 4)]),
    ],
)
def test_bytes_and_messages_of_a_step_are_those_on_the_page(
    pool: Pool, micro_batches: int, workers: int, latency_bytes: int
) -> None:
    ranks = pool.run(workers, counted, document(micro_batches), latency_bytes)
    buckets = ranks[0].buckets
    assert len(buckets) > 1
    gradients = step_traffic("exact", micro_batches, workers, buckets, latency_bytes=latency_bytes)
    exchange = exchange_traffic(micro_batches, workers, parts=ranks[0].parts, flags=ranks[0].flags)
    assert max(rank.sent + rank.apart for rank in ranks) == gradients.bytes + exchange.bytes
    assert max(rank.messages for rank in ranks) == gradients.messages
    assert {rank.apart for rank in ranks} <= {0, exchange.bytes}


def test_a_slower_link_a_larger_k_and_more_messages_cost_efficiency() -> None:
    """The direction of every term, and that what is hidden costs nothing."""
    link = Link(25.0, 20e-6)
    base = efficiency(1.0, [Traffic(1, 10**9, 100)], link)
    assert efficiency(1.0, [Traffic(1, 10**9, 100)], Link(10.0, 20e-6)) < base
    assert efficiency(1.0, [Traffic(1, 4 * 10**9, 100)], link) < base
    assert efficiency(1.0, [Traffic(1, 10**9, 10**5)], link) < base
    assert efficiency(10.0, [Traffic(1, 10**9, 100)], link) == 1.0


@pytest.mark.parametrize("workers", [8, 64, 256])
def test_a_power_of_two_of_workers_sends_the_bytes_of_native_in_fewer_messages(workers: int) -> None:
    buckets = [262_144, 6_553_600]
    exact = step_traffic("exact", 2 * workers, workers, buckets)
    native = step_traffic("native", 2 * workers, workers, buckets)
    assert (exact.sums, exact.bytes) == (1, native.bytes)
    assert exact.messages == 2 * (2 * (workers.bit_length() - 1) - 1)
    assert native.messages == 2 * 2 * (workers - 1)


PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("parameters", "step_s", "link"),
    [
        pytest.param(124e6, 0.25, Link(25.0, 20e-6), marks=pytest.mark.exact),
        (0.66e6, 0.038, Link(10.0, 50e-6)),
    ],
)
def test_the_page_shows_what_the_script_prints(parameters: float, step_s: float, link: Link) -> None:
    """All tables but those of measured times."""
    found = tables(int(parameters), step_s, link)
    shown = ["step"] if parameters < 1e6 else ["step", "checkpoint", "record"]
    for line in as_markdown({name: found[name] for name in shown}).splitlines():
        if line.startswith("| "):
            assert line in PAGE.read_text()
