"""Checks before training whether all nodes of a cluster see the folders of a run."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lockstep.attempts import problems
from lockstep.checkpoint.runs.run_checkpoints import on_disk
from lockstep.driver.signals import StopSignal
from lockstep.errors import first_line
from lockstep.running_time import running_s
from lockstep.spec.fields import Spec

PATIENCE_S = 60.0
"""The least time that a node may take to answer, since it must start a process."""

ANNOUNCED_S = 15.0
"""Seconds after which the driver says which nodes it waits for."""


def local_folders(spec: Spec) -> dict[str, str]:
    """The folders that workers and the driver both use, by the field that names them."""
    folders = {"record.folder": str(spec.folder)}
    storage = on_disk(spec.checkpoint.storage)
    if storage is not None:
        folders["checkpoint.storage"] = str(storage)
    return folders


def patience_s(spec: Spec) -> float:
    """How long a node may take to answer: a job's environment may have to be installed there first."""
    return max(PATIENCE_S, spec.faults.wait_for_workers_s)


def check_shared(spec: Spec, stop: StopSignal, say: Callable[[str], None] = lambda text: None) -> list[str]:
    """SpecError if a worker could be placed on a machine that does not see a folder of the run; returns warnings for other problems.

    If `stop` is asked for, nodes that have not answered are skipped. ClusterError where one does not answer in time.
    """
    import ray

    own_address = ray.util.get_node_ip_address()
    others = {
        node["NodeManagerAddress"]: node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeManagerAddress"] != own_address and node["Resources"].get("CPU", 0) > 0
    }
    if not others:
        return _fleeting(spec)
    with _probes(local_folders(spec)) as probes:
        for address, unseen in _seen_from(others, probes, patience_s(spec), stop, say).items():
            for field in unseen:
                raise problems.OTHER_FOLDER(
                    field=field,
                    folder=local_folders(spec)[field],
                    node=address,
                    store=", or to s3://… or gs://…" if field == "checkpoint.storage" else "",
                )
    return _fleeting(spec) + _one_node(spec)


@contextmanager
def _probes(folders: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Create a new file in each folder, and remove it afterwards; their paths by field."""
    probes = {field: str(Path(folder, f".lockstep-{uuid.uuid4().hex}")) for field, folder in folders.items()}
    try:
        for path in probes.values():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).touch()
        yield probes
    finally:
        for path in probes.values():
            Path(path).unlink(missing_ok=True)


def _seen_from(
    others: Mapping[str, str],
    probes: Mapping[str, str],
    limit_s: float,
    stop: StopSignal,
    say: Callable[[str], None],
) -> dict[str, list[str]]:
    """For each address, the fields whose probe is missing. A node that is lost meanwhile is skipped: no worker will be placed there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(unseen)
    pending = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            dict(probes)
        ): address
        for address, node in others.items()
    }
    unseen_fields: dict[str, list[str]] = {}
    began, announced = running_s(), False
    while pending and not stop.asked:
        for answer in ray.wait([*pending], num_returns=len(pending), timeout=min(1.0, limit_s))[0]:
            address = pending.pop(answer)
            try:
                unseen_fields[address] = ray.get(answer)
            except (
                ray.exceptions.TaskUnschedulableError,
                ray.exceptions.NodeDiedError,
                ray.exceptions.WorkerCrashedError,
            ):
                continue
            except ray.exceptions.RayError as error:
                raise problems.NODE_FAILED(node=address, got=first_line(error)) from error
        waited_s, silent = running_s() - began, " and ".join(sorted(pending.values()))
        if pending and waited_s > limit_s:
            raise problems.NODE_SILENT(nodes=silent, seconds=f"{limit_s:g}")
        if pending and waited_s > ANNOUNCED_S and not announced:
            say(f"waiting for {silent}, starting a process there to check the run's folders")
            announced = True
    return unseen_fields


def unseen(probes: Mapping[str, str]) -> list[str]:
    """The fields whose probe is missing, or whose folder is not writable."""
    return [
        field
        for field, path in probes.items()
        if not Path(path).exists() or not os.access(Path(path).parent, os.W_OK)
    ]


def _fleeting(spec: Spec) -> list[str]:
    """Warnings about folders inside a job's copy of the working directory."""
    if "working_dir_files" not in Path.cwd().parts:
        return []
    copy = str(Path.cwd())
    named = {**local_folders(spec), "record.uri": (spec.record.uri or "").partition(":///")[2]}
    return [
        f"{field}: {value!r} is in the job's copy of the working directory, which Ray deletes after the job; "
        f"set {field} to a permanent place"
        for field, value in named.items()
        if value.startswith(copy)
    ]


def _one_node(spec: Spec) -> list[str]:
    """A warning about a record that only this node can read."""
    if not (spec.record.uri or "").startswith(("sqlite", "file", "/")):
        return []
    return [
        f"record.uri: {spec.record.uri!r} is a file that this node writes; a resume that starts on another node will not find the "
        "run; set record.uri to a tracking server"
    ]
