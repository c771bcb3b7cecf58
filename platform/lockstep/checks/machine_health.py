"""How well each machine of a fleet is: its speed, its bits, memory, disk, clock, versions and links, each judged by the median or the majority of all.

Each measurement takes seconds and needs nothing of a run. A machine is *unwell* if a run on it would be slow or wrong; everything else that is
noticed about it is a remark.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checks.findings import Finding, failed, passed, warned
from lockstep.printing import size_text
from lockstep.record.versions import versions

SLOW = 0.7
"""A device, a disk or a link is slow if it is below this share of the median of its kind."""

SKEW_S = 1.0
"""Seconds by which a clock may differ from the driver's."""

LITTLE_DISK = 1 << 30
LITTLE_MEMORY = 0.5
"""Of the median of what is available."""

SIZE = {"cpu": 384, "cuda": 4096}
"""Rows of the square matrices that are multiplied."""

DISK_BYTES = 32 << 20
LINK_BYTES, PINGS = 8 << 20, 20
"""Sizes of the messages by which the rate and the delay of a link are measured, and how many of the small ones."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way to the first machine of the fleet, and the sum over all of them."""

    delay_s: float
    """Of a message of some bytes, one way: the median."""
    bytes_per_s: float
    all_reduce_s: float
    """Seconds for an all-reduce of LINK_BYTES by all machines."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What was measured of one machine. Rates are operations, or bytes, per second."""

    host: str
    products_per_s: Mapping[str, float] = field(default_factory=dict)
    """Multiplications of two matrices of SIZE, by device, such as `cpu` and `cuda:0`."""
    digests: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The different results of the one product that was repeated all the time, by device: one on a device that computes right."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """What each device is."""
    available_bytes: int = 0
    disk_free_bytes: int = 0
    disk_bytes_per_s: float = 0.0
    clock_offset_s: float = 0.0
    """How far its clock is ahead of the driver's."""
    clock_error_s: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    link: Link | None = None
    problem: str = ""
    """Why nothing was measured."""


@dataclass(frozen=True, slots=True)
class Health:
    """The judgment of one machine: `unwell` has why no worker should run there, `remarks` what else is different."""

    node: str
    vitals: Vitals
    unwell: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def measure(folder: Path, seconds: float = 2.0, threads: int = 1) -> Vitals:
    """Measure this machine: each of its devices for so many `seconds`, the disk of `folder`."""
    import psutil  # type: ignore[import-untyped]
    import torch

    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    rates: dict[str, float] = {}
    digests: dict[str, list[str]] = {}
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for device in devices:
            rates[device], digests[device] = _products(torch.device(device), seconds)
    finally:
        torch.set_num_threads(threads_before)
    existing = next((parent for parent in (folder, *folder.parents) if parent.is_dir()), Path.cwd())
    return Vitals(
        platform.node(),
        rates,
        digests,
        {
            device: torch.cuda.get_device_name(device) if device != "cpu" else _processor()
            for device in devices
        },
        psutil.virtual_memory().available,
        shutil.disk_usage(existing).free,
        _disk_rate(existing),
        versions={**versions(), "cuda": str(torch.version.cuda)},
    )


def _products(device: Any, seconds: float) -> tuple[float, list[str]]:
    """How many products a second a device computes, and the digests of those that it got."""
    import torch

    size = SIZE[device.type]
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))
    first = a @ b
    results = {_digest(first)}

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        product = a @ b
        count += 1
        if count % 10 == 0 and not torch.equal(product, first):
            results.add(_digest(product))
    wait()
    return count / (time.perf_counter() - began), sorted(results)


def _digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _disk_rate(folder: Path) -> float:
    """Bytes per second that are written to the disk of a folder; 0 where it refuses."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            for _ in range(DISK_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return DISK_BYTES / (time.perf_counter() - began)
    except OSError:
        return 0.0


def measure_link(rank: int, size: int, store: Any) -> Link:
    """Measure the links of a fleet, in all of its machines at once: each of them with the first, one after another, and all together.

    `store` is where they meet, a `torch.distributed.Store`. The process must have no process group yet.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        small, large = torch.zeros(4), torch.ones(LINK_BYTES // 4)
        dist.all_reduce(large.clone())
        delay_s, rate = 0.0, 0.0
        for measured_rank in range(1, size):
            dist.barrier()
            if rank not in (0, measured_rank):
                continue
            peer = measured_rank if rank == 0 else 0
            times = [_round_trip(small, peer, first=rank == 0) for _ in range(PINGS)]
            long_s = min(_round_trip(large, peer, first=rank == 0) for _ in range(2))
            if rank == measured_rank:
                delay_s = statistics.median(times) / 2
                rate = 2 * LINK_BYTES / long_s
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(large)
        return Link(delay_s, rate, time.perf_counter() - began)
    finally:
        dist.destroy_process_group()


def _round_trip(tensor: Any, peer: int, *, first: bool) -> float:
    import torch.distributed as dist

    began = time.perf_counter()
    for sends in (first, not first):
        if sends:
            dist.send(tensor, peer)
        else:
            dist.recv(tensor, peer)
    return time.perf_counter() - began


# --- the judgment ---------------------------------------------------------------------------------------------


def judged(fleet: Mapping[str, Vitals]) -> list[Health]:
    """The health of each machine, by its name, in the order given. With two machines a median says little: the slower one is below it."""
    return [
        Health(node, vitals, [vitals.problem], [])
        if vitals.problem
        else Health(node, vitals, _unwell(vitals, fleet), _remarks(vitals, fleet))
        for node, vitals in fleet.items()
    ]


def _unwell(vitals: Vitals, fleet: Mapping[str, Vitals]) -> list[str]:
    machines = [machine for machine in fleet.values() if not machine.problem]
    faults = []
    for device, rate in vitals.products_per_s.items():
        alike = [
            (machine.products_per_s[name], machine.digests[name])
            for machine in machines
            for name, kind in machine.kinds.items()
            if kind == vitals.kinds[device]
        ]
        if len(vitals.digests[device]) > 1:
            faults.append(f"{device} computes one matrix product in {len(vitals.digests[device])} ways")
        majority, count = Counter(digests[0] for _, digests in alike).most_common(1)[0]
        if vitals.digests[device][0] != majority and count > len(alike) / 2:
            faults.append(
                f"{device} computes another matrix product than {count} of {len(alike)} {vitals.kinds[device]}"
            )
        median = statistics.median(rate for rate, _ in alike)
        if rate < SLOW * median:
            faults.append(
                f"{device} computes {rate:.3g} matrix products a second, the median is {median:.3g}"
            )
    if vitals.disk_free_bytes < LITTLE_DISK:
        faults.append(f"{size_text(vitals.disk_free_bytes)} are free on the disk of the runs")
    if vitals.disk_bytes_per_s == 0.0:
        faults.append("the disk of the runs cannot be written")
    if abs(vitals.clock_offset_s) > SKEW_S + vitals.clock_error_s:
        faults.append(f"its clock differs from the driver's by {vitals.clock_offset_s:+.1f} s")
    for name, version in vitals.versions.items():
        common, count = Counter(machine.versions.get(name) for machine in machines).most_common(1)[0]
        if version != common and count > len(machines) / 2:
            faults.append(f"{name} is {version}, on {count} of {len(machines)} machines {common}")
    links = [
        machine.link.bytes_per_s
        for machine in machines
        if machine.link is not None and machine.link.bytes_per_s
    ]
    if (
        vitals.link is not None
        and vitals.link.bytes_per_s
        and vitals.link.bytes_per_s < SLOW / 2 * statistics.median(links)
    ):
        faults.append(
            f"its link carries {_rate(vitals.link.bytes_per_s)}, the median is {_rate(statistics.median(links))}"
        )
    return faults


def _remarks(vitals: Vitals, fleet: Mapping[str, Vitals]) -> list[str]:
    machines = [machine for machine in fleet.values() if not machine.problem]
    remarks = []
    memory = statistics.median(machine.available_bytes for machine in machines)
    if vitals.available_bytes < LITTLE_MEMORY * memory:
        remarks.append(
            f"{size_text(vitals.available_bytes)} of memory are available, the median is {size_text(int(memory))}"
        )
    disk = statistics.median(machine.disk_bytes_per_s for machine in machines)
    if vitals.disk_bytes_per_s < SLOW / 2 * disk:
        remarks.append(
            f"the disk of the runs writes {_rate(vitals.disk_bytes_per_s)}, the median is {_rate(disk)}"
        )
    if len({machine.kinds.get("cuda:0", machine.kinds.get("cpu")) for machine in machines}) > 1:
        remarks.append(f"the fleet is mixed; this is {', '.join(sorted(set(vitals.kinds.values())))}")
    return remarks


def findings(fleet: Sequence[Health]) -> list[Finding]:
    """The health of a fleet as findings of `lockstep check`: a line for each machine."""
    results = []
    for health in fleet:
        line = f"{health.node}: {shown(health.vitals)}" if not health.vitals.problem else health.node
        if health.unwell:
            results.append(
                failed(
                    "health",
                    f"{line}; {'; '.join(health.unwell)}",
                    "mend it, keep workers away from it, or set faults.health=true, which leaves it out of each attempt",
                )
            )
        elif health.remarks:
            results.append(
                warned("health", f"{line}; {'; '.join(health.remarks)}", "see whether that is meant")
            )
        else:
            results.append(passed("health", line))
    return results


def shown(vitals: Vitals) -> str:
    """The figures of a machine in one line."""
    parts = [f"{rate:.4g} products/s on {device}" for device, rate in vitals.products_per_s.items()]
    parts.append(f"{size_text(vitals.available_bytes)} of memory")
    parts.append(f"{size_text(vitals.disk_free_bytes)} of disk at {_rate(vitals.disk_bytes_per_s)}")
    if vitals.clock_error_s:
        parts.append(f"clock {vitals.clock_offset_s * 1e3:+.0f} ms")
    if vitals.link is not None and vitals.link.bytes_per_s:
        parts.append(f"link {vitals.link.delay_s * 1e6:.0f} µs, {_rate(vitals.link.bytes_per_s)}")
    if vitals.link is not None:
        parts.append(f"all-reduce of {LINK_BYTES >> 20} MiB {vitals.link.all_reduce_s * 1e3:.3g} ms")
    return ", ".join(parts)


def _rate(bytes_per_s: float) -> str:
    return f"{size_text(int(bytes_per_s))}/s"
