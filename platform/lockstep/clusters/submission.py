"""Runs as jobs of a cluster: sent by Ray's job API, followed from here, their exit code is the command's."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.clusters.connection import show_token
from lockstep.clusters.local_cluster import running_cluster
from lockstep.clusters.noticeboard import notices
from lockstep.clusters.packaging import NOTED, pack
from lockstep.errors import ClusterError, SpecError
from lockstep.record.documents import without_password

POLL_S = 0.5
"""How often an ending job is asked whether it has ended."""

PATIENCE_S = 60.0
"""How long a cluster that does not answer is waited for, while a job is followed."""

NO_AGENT = "No available agent"
"""Ray's words where the head node's agent has not started, or could not."""

RUN_ID = re.compile(r"^run\s+([0-9a-f]{32})\s*$", re.MULTILINE)
"""The line by which a run says which one it is."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """What is known of a job."""

    job: str
    address: str
    status: str
    exit_code: int | None
    """The job's own; None while it runs."""
    run_id: str | None
    message: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "resume": self.resume}

    @property
    def resume(self) -> str | None:
        """The command that goes on with the run."""
        return f"lockstep submit {self.run_id} --address {self.address}" if self.run_id else None


def find_address(given: str | None) -> str:
    """The job API: what is given, RAY_API_SERVER_ADDRESS, or the cluster that runs here. SpecError without one."""
    cluster = running_cluster()
    address = given or os.environ.get("RAY_API_SERVER_ADDRESS") or (cluster.dashboard if cluster else None)
    if address is None:
        raise SpecError(
            "address: missing; give --address http://host:8265, or start nodes here with lockstep cluster up"
        )
    if not address.startswith(("http://", "https://")):
        raise SpecError(f"address: got {address!r}, wanted the job API's URL such as http://127.0.0.1:8265")
    return address.rstrip("/")


def connect(address: str) -> Any:
    """A client of the job API at `address`. ClusterError where it does not answer or does not let us in."""
    show_token(address)
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray").setLevel(logging.ERROR)  # a line for every .gitignore that it finds

    try:
        return JobSubmissionClient(address)
    except Exception as error:  # the client raises RuntimeError, ConnectionError and what requests raises
        raise job_api_error(error, address) from error


def job_api_error(error: Exception, address: str) -> ClusterError:
    """What the job API answered, in one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "uthentication" in text or "401" in text or "403" in text:
        return ClusterError(
            f"address: {address} expects another token than the one in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token; "
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the cluster's"
        )
    if NO_AGENT in text:
        return ClusterError(
            f"address: {address} has no agent that accepts jobs; another Ray cluster on its machine may use the port of its "
            "agent: start it with ray start --head --dashboard-agent-listen-port=0"
        )
    return ClusterError(f"address: {address} does not answer like Ray's job API ({text})")


def entrypoint(what: str, overrides: Sequence[str], name: str | None, folder: Path) -> list[str]:
    """The command that runs on the cluster: a run id is resumed, a spec trained. SpecError where that cannot work there."""
    for override in overrides:
        if without_password(override) != override:
            raise SpecError(
                f"{override.partition('=')[0]}: contains a password, which every process list on the cluster would show; "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the cluster's nodes are started"
            )
    if re.fullmatch("[0-9a-f]{32}", what) and not Path(folder, what).exists():
        return ["python", "-m", "lockstep", "resume", what, *overrides]
    spec = Path(folder, what).resolve()
    if not spec.is_file():
        raise SpecError(f"spec: cannot read {what!r}: there is no such file, and it is not a run id")
    if not spec.is_relative_to(folder.resolve()):
        raise SpecError(
            f"spec: {what!r} is not below {str(folder)!r}, which is the folder sent with the job; start in a folder above the spec"
        )
    named = [] if name is None else ["--run", name]
    return [
        "python", "-m", "lockstep", "train", str(spec.relative_to(folder.resolve())), *named, *overrides
    ]  # fmt: skip


def submit(
    what: str,
    overrides: Sequence[str],
    *,
    address: str,
    name: str | None,
    installed: bool,
    say: Callable[[str], None],
) -> str:
    """Send a run to the cluster; the id of its job.

    `what` is a spec's file or the id of a run to resume. Lockstep goes along, so that the cluster runs this version of it,
    unless `installed` says to take the cluster's.
    """
    folder = Path.cwd()
    words = entrypoint(what, overrides, name, folder)
    client = connect(address)
    package = pack(folder)
    if package is not None and package.size > NOTED:
        say(f"sending {package.described()}")
    environment: dict[str, Any] = {"working_dir": str(folder)}
    if not installed:
        environment["py_modules"] = [str(Path(__file__).parents[1])]
    job = f"{name or Path(what).parent.name or 'run'}-{uuid.uuid4().hex[:8]}".lstrip("-.")
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            sent: str = client.submit_job(
                entrypoint=shlex.join(words),
                submission_id=re.sub(r"[^\w.-]", "-", job),
                runtime_env=environment,
                metadata={"lockstep": what, **({"run": name} if name else {})},
            )
        except Exception as error:  # as in connect
            if NO_AGENT not in str(error) or time.monotonic() > until:
                raise job_api_error(error, address) from error
            time.sleep(POLL_S)  # a cluster that has just started
        else:
            return sent


def follow(job: str, *, address: str, write: Callable[[str], None]) -> Submitted:
    """Show a job's output as it comes, until the job has ended.

    A connection that breaks is taken up again; ClusterError where the cluster stays away for PATIENCE_S.
    """
    from aiohttp import ClientError

    client, output = connect(address), _Output(write)
    answered_at = time.monotonic()
    while True:
        with suppress(RuntimeError, OSError, ClientError):  # a broken stream; the job is what counts
            asyncio.run(output.take(client, job))
        try:
            now = look(client, job, address, output.run_id)
        except ClusterError:
            if time.monotonic() - answered_at > PATIENCE_S:
                raise
        else:
            answered_at = time.monotonic()
            if now.exit_code is not None:
                return now
        time.sleep(POLL_S)


class _Output:
    """A job's output, of which nothing is shown twice: a stream that is taken up again starts from the beginning."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._shown = 0
        self._tail = ""
        self.run_id: str | None = None

    async def take(self, client: Any, job: str) -> None:
        """Show what comes, until the stream ends."""
        at = 0
        async for text in client.tail_job_logs(job):
            new = text[max(0, self._shown - at) :]
            at += len(text)
            if new:
                self._shown = at
                self._write(new)
                self._tail = (self._tail + new)[-4096:]
                found = RUN_ID.findall(self._tail)
                self.run_id = found[-1] if found else self.run_id


def look(client: Any, job: str, address: str, run_id: str | None = None) -> Submitted:
    """How a job stands. ClusterError where the cluster does not know it."""
    try:
        found = client.get_job_info(job)
    except Exception as error:  # as in connect
        raise job_api_error(error, address) from error
    status = str(getattr(found.status, "value", found.status))
    code: int | None = found.driver_exit_code
    if status == "SUCCEEDED":
        code = 0
    elif status == "STOPPED":
        code = 143
    elif status == "FAILED":
        code = code or 1
    else:
        code = None
    return Submitted(job, address, status, code, run_id, found.message or "")


def status_of(address: str, gcs: str) -> dict[str, Any]:
    """Nodes, jobs and runs of the cluster whose job API is at `address` and whose GCS at `gcs`."""
    client = connect(address)
    from ray.util.state import list_nodes

    try:
        nodes = list_nodes(address=address)
        jobs = client.list_jobs()
        running = {job.job_id for job in jobs if str(getattr(job.status, "value", job.status)) == "RUNNING"}
        runs = notices(gcs, {job for job in running if job is not None})
    except Exception as error:  # as in connect
        raise job_api_error(error, address) from error
    return {
        "alive": [
            {
                "id": node.node_id,
                "address": node.node_ip,
                "alive": node.state == "ALIVE",
                "resources": dict(node.resources_total),
            }
            for node in nodes
        ],
        "jobs": [
            {
                "id": job.submission_id,
                "status": str(getattr(job.status, "value", job.status)),
                "run": (job.metadata or {}).get("run"),
                "entrypoint": job.entrypoint,
            }
            for job in jobs
            if job.submission_id is not None
        ],
        "runs": runs,
    }
