"""Which cluster a command joins, and whether it answers.

Only a named cluster is joined: one given by `--address`, by RAY_ADDRESS (which Ray sets in a job to the job's own cluster), or
started with `lockstep cluster up` by the same user. Ray by itself would join any cluster that runs on the machine.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from lockstep.clusters import problems
from lockstep.clusters.local_cluster import running_cluster
from lockstep.clusters.ray_internals.address_file import address_file, default_folder
from lockstep.process import launched_by_torchrun

TCP_S = 3.0
"""How long an address may take to accept a connection."""

HEALTH_S = 4.0
"""How long a GCS may take to answer a health check."""

CONNECT_S = 2.0
"""How long a node may take to answer."""

LOCAL = "local"
"""The address of a new cluster that belongs to the command and ends with it."""


def cluster_address(address: str | None) -> str:
    """Where to connect, as host:port, or LOCAL. SpecError for `auto` if no cluster is known, and in a rank of torchrun."""
    if launched_by_torchrun():
        raise problems.UNDER_TORCHRUN(
            rank=os.environ.get("RANK", "0"), ranks=os.environ.get("WORLD_SIZE", "1")
        )
    named = address or os.environ.get("RAY_ADDRESS") or None
    if named == "auto":
        return _found_here()
    if named is not None:
        return named
    cluster = running_cluster()
    return cluster.address if cluster is not None else LOCAL


def _found_here() -> str:
    """The cluster that `auto` means: RAY_ADDRESS, the user's own, or the one that `ray start` noted on this machine."""
    named, cluster = os.environ.get("RAY_ADDRESS"), running_cluster()
    if named and named != "auto":
        return named
    if cluster is not None:
        return cluster.address
    try:
        return address_file(default_folder()).read_text(encoding="utf-8").strip()
    except OSError:
        raise problems.NO_CLUSTER_HERE() from None


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of `host:port` or of a URL. SpecError for anything else."""
    try:
        parts = urlsplit(address if "://" in address else f"ray://{address}")
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:  # a port that is not a number, or above 65535
        pass
    raise problems.ADDRESS(got=address)


def reached(host: str, port: int) -> bool:
    """Whether a process at this address takes connections."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        return False
    return True


def _nothing() -> None: ...


def check_answers(address: str, look: Callable[[], object] = _nothing) -> None:
    """ClusterError, within TCP_S + HEALTH_S, where no live Ray cluster answers at `address`. `look` is called meanwhile, and may raise."""
    host, port = host_and_port(address)
    try:
        socket.create_connection((host, port), TCP_S).close()
    except OSError as error:
        raise problems.NO_ANSWER(got=address, why=error.strerror or error) from error
    if address.startswith("ray://") or os.environ.get("RAY_USE_TLS") == "1":
        return  # Ray itself checks its client server and a GCS behind TLS
    problem = _unhealthy(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", look)
    if problem is not None:
        raise problems.NO_HEAD_NODE(got=address, why=problem)


def _unhealthy(target: str, look: Callable[[], object]) -> str | None:
    """What is wrong with the GCS at `target`, by gRPC's own health check, which every GCS serves. None where it answers."""
    import grpc  # type: ignore[import-untyped]  # comes with ray[default]

    with grpc.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),)) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes
        )
        # An empty HealthCheckRequest, without the name of a service, asks for the whole server.
        answer = check.future(b"", timeout=HEALTH_S)
        try:
            while not answer.done():
                look()
                time.sleep(0.02)
        except KeyboardInterrupt:
            answer.cancel()
            raise
        try:
            answer.result()
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                return None  # it is alive; Ray will find out whether it lets us in
            if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                return f"does not answer as a Ray cluster within {HEALTH_S:.0f} s: it may be dying, or another program"
            return f"is no Ray head node ({code.name})"
    return None
