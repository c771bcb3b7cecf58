"""Network namespaces as machines, joined by a switch; links may be as slow as is wanted. Needs root and iproute2 (`ip`, `tc`)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WIRE = "wire"
"""The interface of every machine."""

MTU = 9000
"""Bytes of a packet, as networks of clusters have it: headers are 0.7 % of what is sent, and not 4.5 %."""

_CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    """`ip WORDS`; CalledProcessError where it fails."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def can_simulate(*, slow: bool = False) -> str | None:
    """Why this machine has no such networks, or None; `slow` ones need `tc` with a token bucket as well."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "wants root and iproute2"
    name = f"lockstep-probe-{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"no network namespaces here: {probe.stderr.strip()}"
    try:
        if slow:
            limit(name, "lo", 100)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no token bucket here: {error}"
    finally:
        ip("netns", "del", name)
    return None


def limit(name: str, interface: str, mbit_per_s: float) -> None:
    """Let no more than `mbit_per_s` out of an interface of a namespace."""
    words = ["tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", "rate", f"{mbit_per_s}mbit"]
    subprocess.run([*words, "burst", "128kb", "latency", "100ms"], check=True, capture_output=True, text=True)


@contextmanager
def switched(machines: int, mbit_per_s: float) -> Iterator[list[tuple[str, str]]]:
    """So many machines with links of `mbit_per_s` each way to one switch: the name and the address of each."""
    switch = f"lockstep-{os.getpid()}-switch"
    found = [(f"lockstep-{os.getpid()}-{i}", f"10.78.8.{i + 1}") for i in range(machines)]
    made = []
    try:
        for name in (switch, *(name for name, _ in found)):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "mtu", str(MTU), "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for i, (name, address) in enumerate(found):
            ends = ["name", f"port{i}", "mtu", str(MTU), "netns", switch]
            ip("-n", name, "link", "add", WIRE, "mtu", str(MTU), "type", "veth", "peer", *ends)
            ip("-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", WIRE)
            ip("-n", name, "link", "set", WIRE, "up")
            limit(name, WIRE, mbit_per_s)
            limit(switch, f"port{i}", mbit_per_s)
        yield found
    finally:
        for name in made:
            ip("netns", "del", name)


def enter(name: str) -> None:
    """Have this process, and the threads that it starts from here on, run in a namespace. OSError where it may not."""
    with Path("/run/netns", name).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


def sent_bytes() -> int:
    """What this process's machine has sent over its wire so far, headers included."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == WIRE:
            return int(counters.split()[8])
    raise OSError(f"no interface {WIRE} here")
