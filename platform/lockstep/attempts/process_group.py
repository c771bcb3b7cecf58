"""How the workers of an attempt form their first process group: at a rendezvous behind the secret of the attempt.

Ray's own backend for torch has rank 0 serve a TCPStore, which listens on every interface and answers whoever connects. This one is used with Ray's
public trainer as well.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray.train
from ray.train.torch import TorchConfig

from lockstep.communication.credentials import Secret
from lockstep.communication.group import ensure_descriptors, form_default_group
from lockstep.communication.store import connect_store, serve_store
from lockstep.communication.waits import COLLECTIVE_TIMEOUT
from lockstep.errors import ClusterError

_RaysBackend: Any = TorchConfig().backend_cls


class AuthenticatedBackend(_RaysBackend):  # type: ignore[misc]  # untyped base
    """Forms the group in `on_start`; all else is Ray's."""

    def on_start(self, worker_group: Any, backend_config: AuthenticatedTorch) -> None:
        """Have all workers meet at one of the first. Raises what the first of them raises."""
        size, secret = len(worker_group), backend_config.secret
        address = worker_group.execute_single(0, _serve, backend_config.backend, secret, size)
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, _join, backend_config.backend, rank, size, address, secret
                )
                for rank in range(size)
            ]
        )


@dataclass
class AuthenticatedTorch(TorchConfig):  # type: ignore[misc]  # untyped base
    """Ray's settings for torch, with the secret of the attempt."""

    secret: Secret = field(default_factory=Secret)

    @property
    def backend_cls(self) -> type[AuthenticatedBackend]:
        return AuthenticatedBackend


class ReplicaBackend(_RaysBackend):  # type: ignore[misc]  # untyped base
    """Each worker is a replica group of its own, which Ray replaces alone. What group they form is theirs to find out: `replica_worker`."""

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None: ...

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None: ...

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None: ...


@dataclass
class ReplicaTorch(TorchConfig):  # type: ignore[misc]  # untyped base
    """Ray's settings for torch, with which it forms no group."""

    @property
    def backend_cls(self) -> type[ReplicaBackend]:
        return ReplicaBackend


_store: list[Any] = []
"""The store at which this process has met the others: torch keeps only its C++ half."""


def form_group(backend: str, store: Any, rank: int, size: int) -> None:
    """Make the default process group of those that meet at a store, which is kept as long as this process."""
    _store[:] = [store]
    form_default_group(backend, store, rank, size)


def set_torchrun_variables(
    rank: int, size: int, local_rank: int, local_size: int, node_rank: int, device: str
) -> None:
    """Set the variables that torchrun sets: libraries read them."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_size),
        NODE_RANK=str(node_rank),
        ACCELERATE_TORCH_DEVICE=device,
    )


def allow_descriptors(size: int) -> None:
    """Let this process open as many files as the connections to so many workers need, as far as the system allows.

    Too low a limit is refused by `Group.join`, which runs where errors reach the run.
    """
    with suppress(ClusterError):
        ensure_descriptors(size, groups=2)


def _serve(backend: str, secret: Secret, size: int) -> tuple[str, int]:
    """In the worker of rank 0, serve the store at which all meet. Returns its address."""
    allow_descriptors(size)
    store = serve_store(
        ray.util.get_node_ip_address(), secret, size, COLLECTIVE_TIMEOUT, gpus=backend == "nccl"
    )
    _store[:] = [store]
    return store.host, store.port


def _join(backend: str, rank: int, size: int, address: tuple[str, int], secret: Secret) -> None:
    """In each worker, make the default process group."""
    allow_descriptors(size)
    context = ray.train.get_context()
    local_rank, local_size = context.get_local_rank(), context.get_local_world_size()
    device = str(ray.train.torch.get_device())
    set_torchrun_variables(rank, size, local_rank, local_size, context.get_node_rank(), device)
    gpus = backend == "nccl"
    store = connect_store(*address, secret, COLLECTIVE_TIMEOUT, gpus=gpus) if rank > 0 else _store[0]
    form_group(backend, store, rank, size)
