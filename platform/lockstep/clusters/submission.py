"""Runs as jobs of a cluster: sent by Ray's job API and followed from here, with the job's exit code as the command's."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.clusters import problems
from lockstep.clusters.bounded_calls import within
from lockstep.clusters.connection import show_token
from lockstep.clusters.driver_restarter import JOB, first_of, pause_s, retry_of, was_lost
from lockstep.clusters.local_cluster import running_cluster
from lockstep.clusters.packaging import NOTED, pack
from lockstep.clusters.run_registry import notices
from lockstep.errors import ClusterError, LockstepError, SilentError, SpecError
from lockstep.exit_codes import ExitCode
from lockstep.record.redaction import redacted, without_uri_secrets
from lockstep.running_time import running_s
from lockstep.spec.loading import load_spec

POLL_S = 0.5
"""Seconds between two requests for the state of a job."""

CONNECT_S = 10.0
"""How long the job API may take to answer at first: Ray's client waits without a limit."""

ANSWER_S = 60.0
"""How long it may take to answer one request."""

SEND_S = 600.0
"""How long sending a package may take; a package has 100 MiB at most."""

QUIET_S = 60.0
"""How long a job may print nothing before its output is requested anew: a broken connection looks the same."""

PATIENCE_S = 60.0
"""How long to wait for a cluster that does not answer while a job is followed."""

NO_AGENT = "No available agent"
"""Ray's words if the head node's agent has not started, or could not."""

RUN_ID = re.compile(r"^run\s+([0-9a-f]{32})\s*$", re.MULTILINE)
"""The line in which a run prints its id."""

RETRIES = re.compile(r"\s--retries[ =](\d+)")
"""The option in a job's command."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The state of a job."""

    job: str
    address: str
    status: str
    exit_code: int | None
    """The job's own; None while it runs."""
    run_id: str | None
    message: str
    lost: bool = False
    """Whether it has ended, but not by its run's own decision."""
    retries: int = 0
    """How many times its driver restarter may start the run again."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "resume": self.resume}

    @property
    def resume(self) -> str | None:
        """The command that resumes the run."""
        return f"lockstep submit {self.run_id} --address {self.address}" if self.run_id else None


def find_address(address: str | None) -> str:
    """The URL of the job API: the given one, RAY_API_SERVER_ADDRESS, or that of the cluster that runs here. SpecError without any."""
    cluster = running_cluster()
    url = address or os.environ.get("RAY_API_SERVER_ADDRESS") or (cluster.dashboard if cluster else None)
    if url is None:
        raise problems.NO_ADDRESS()
    if not url.startswith(("http://", "https://")):
        raise problems.JOB_API_ADDRESS(got=url)
    return url.rstrip("/")


def connect(address: str) -> Any:
    """A client of the job API at `address`. ClusterError, within CONNECT_S, where it does not answer or does not let us in."""
    show_token(address)
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray").setLevel(logging.ERROR)  # it logs a line for every .gitignore that it finds

    with _job_api(address):
        return within(CONNECT_S, address, lambda: JobSubmissionClient(address))


@contextmanager
def _job_api(address: str) -> Iterator[None]:
    """Raise as a ClusterError what the job API's client raises in the block: RuntimeError, ConnectionError and what requests raises."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        raise job_api_error(error, address) from error


def job_api_error(error: Exception, address: str) -> ClusterError:
    """The job API's answer as an error of one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "uthentication" in text or "401" in text or "403" in text:
        return problems.OTHER_TOKEN(address=address)
    if NO_AGENT in text:
        return problems.NO_AGENT(address=address)
    return problems.NO_JOB_API(address=address, got=text)


def entrypoint(
    target: str,
    overrides: Sequence[str],
    name: str | None,
    folder: Path,
    retries: int = 0,
    notify: str | None = None,
) -> list[str]:
    """The command that runs on the cluster: it resumes a run id, or trains a spec. SpecError if that cannot work there."""
    if notify is not None and redacted(notify) != notify:
        raise problems.SECRET_IN_NOTIFY()
    for override in overrides:
        if without_uri_secrets(override) != override:
            raise problems.PASSWORD_IN_OVERRIDE(field=override.partition("=")[0])
    options = ["--retries", str(retries)] if retries else []
    options += [] if notify is None else ["--notify", notify]
    if re.fullmatch("[0-9a-f]{32}", target) and not Path(folder, target).exists():
        return ["python", "-m", "lockstep", "resume", target, *options, *overrides]
    spec = Path(folder, target).resolve()
    if not spec.is_file():
        raise problems.NO_SPEC_OR_RUN(got=target)
    if not spec.is_relative_to(folder.resolve()):
        raise problems.SPEC_OUTSIDE(got=target, folder=folder)
    named = [] if name is None else ["--run", name]
    return [
        "python", "-m", "lockstep", "train", str(spec.relative_to(folder.resolve())), *named, *options, *overrides
    ]  # fmt: skip


def job_name(target: str, name: str | None) -> str:
    """The id of a job, by which a run without a `name` is named as well: letters of ASCII, digits, dots, dashes and underscores."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name or Path(target).parent.name).lstrip("-._")[:80]
    return f"{plain or 'run'}-{uuid.uuid4().hex[:8]}"


def submit(
    target: str,
    overrides: Sequence[str],
    *,
    address: str,
    name: str | None,
    installed: bool,
    retries: int,
    notify: str | None = None,
    say: Callable[[str], None],
) -> str:
    """Send a run to the cluster. Returns the id of its job. It is started again up to `retries` times if its driver is lost.

    `target` is a spec's file or the id of a run to resume. Lockstep is sent along, so that the cluster runs this version of it,
    unless `installed` says to use the cluster's own. SpecError for a spec that this version refuses, if this version will run it.
    """
    folder = Path.cwd()
    job = job_name(target, name)
    words = entrypoint(target, overrides, name or (job if retries else None), folder, retries, notify)
    if not installed and Path(target).is_file():
        load_spec(target, overrides)
    client = connect(address)
    package = pack(folder)
    if package is not None and package.size > NOTED:
        say(f"sending {package.described()}")
    environment: dict[str, Any] = {"working_dir": str(folder)}
    if retries:
        environment["env_vars"] = {JOB: job}
    if not installed:
        environment["py_modules"] = [str(Path(__file__).parents[1])]
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            sent: str = within(
                SEND_S,
                address,
                lambda: client.submit_job(
                    entrypoint=shlex.join(words),
                    submission_id=job,
                    runtime_env=environment,
                    metadata={"lockstep": target, **({"run": name} if name else {})},
                ),
            )
        except SilentError:
            raise
        except Exception as error:  # as in connect
            if NO_AGENT not in str(error) or time.monotonic() > until:
                raise job_api_error(error, address) from error
            time.sleep(POLL_S)  # a cluster that has just started
        else:
            return sent


def follow(job: str, *, address: str, write: Callable[[str], None]) -> Submitted:
    """Show a job's output as it comes, until the job has ended, and that of the jobs that its driver restarter starts. Returns how the last one ended.

    A broken connection is made again; ClusterError where the cluster does not answer for PATIENCE_S.
    """
    client = connect(address)
    while True:
        ended = _follow(client, job, address, write)
        following = _retry_after(client, ended)
        if following is None:
            return ended
        write(f"job {job} was lost; job {following} continues its run\n")
        job = following


def _retry_after(client: Any, ended: Submitted) -> str | None:
    """The job that goes on with the run of a lost one. None if there is none, or none appears in time; ClusterError where that cannot be told."""
    first = first_of(ended.job)
    number = 1 if ended.job == first else int(ended.job.rpartition("-")[2]) + 1
    if not ended.lost or number > ended.retries:
        return None
    until = time.monotonic() + pause_s(number) + PATIENCE_S
    while True:
        last = time.monotonic() >= until
        try:
            if retry_of(first, number) in _jobs(client, ended.address):
                return retry_of(first, number)
        except ClusterError:
            if last:
                raise
        if last:
            return None
        time.sleep(POLL_S)


def _jobs(client: Any, address: str) -> set[str | None]:
    """The ids of the cluster's jobs. ClusterError where its job API does not tell them."""
    with _job_api(address):
        listed = within(ANSWER_S, address, client.list_jobs)
    return {job.submission_id for job in listed}


def _follow(client: Any, job: str, address: str, write: Callable[[str], None]) -> Submitted:
    from aiohttp import ClientError

    output, confirmed = _Output(write), False
    answered_at = running_s()
    while True:
        # The stream may break or fall silent; only the job's state counts.
        with suppress(RuntimeError, OSError, ClientError):
            asyncio.run(output.take(client, job))
        try:
            submitted = look(client, job, address, output.run_id)
        except ClusterError:
            if running_s() - answered_at > PATIENCE_S:
                raise
        except SpecError as error:
            if not confirmed:
                raise
            again = (
                "submit its run again"
                if output.run_id is None
                else f"lockstep submit {output.run_id} --address {address} goes on with its run"
            )
            raise problems.JOB_GONE(address=address, job=job, again=again) from error
        else:
            answered_at, confirmed = running_s(), True
            if submitted.exit_code is not None:
                return submitted
        time.sleep(POLL_S)


class _Output:
    """A job's output, without repetition: a stream that is opened again starts from the beginning."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._shown = 0
        self._tail = ""
        self.run_id: str | None = None

    async def take(self, client: Any, job: str) -> None:
        """Show what comes, until the stream ends. TimeoutError where nothing has come for QUIET_S."""
        at = 0
        stream = client.tail_job_logs(job)
        while True:
            try:
                text = await asyncio.wait_for(anext(stream), QUIET_S)
            except StopAsyncIteration:
                return
            new = text[max(0, self._shown - at) :]
            at += len(text)
            if new:
                self._shown = at
                self._write(new)
                self._tail = (self._tail + new)[-4096:]
                run_ids = RUN_ID.findall(self._tail)
                self.run_id = run_ids[-1] if run_ids else self.run_id


def look(client: Any, job: str, address: str, run_id: str | None = None) -> Submitted:
    """The state of a job. SpecError where the cluster has no such job, ClusterError where it does not answer."""
    with _job_api(address):
        try:
            info = within(ANSWER_S, address, lambda: client.get_job_info(job))
        except RuntimeError as error:
            if f"Job {job} does not exist" not in str(error):
                raise
            raise problems.NO_JOB(address=address, got=job) from error
    status = str(getattr(info.status, "value", info.status))
    code: int | None = info.driver_exit_code
    if status == "SUCCEEDED":
        code = ExitCode.DONE
    elif status == "STOPPED":
        code = ExitCode.TERMINATED
    elif status == "FAILED":
        code = code or ExitCode.FAILED
    else:
        code = None
    match = RETRIES.search(info.entrypoint or "")
    return Submitted(
        job,
        address,
        status,
        code,
        run_id,
        info.message or "",
        was_lost(status, info.driver_exit_code),
        int(match[1]) if match else 0,
    )


def status_of(address: str, gcs: str) -> dict[str, Any]:
    """Nodes, jobs and runs of the cluster whose job API is at `address` and whose GCS at `gcs`."""
    client = connect(address)
    from ray.util.state import list_nodes

    with _job_api(address):
        nodes = within(ANSWER_S, address, lambda: list_nodes(address=address))
        jobs = within(ANSWER_S, address, client.list_jobs)
        running = {job.job_id for job in jobs if str(getattr(job.status, "value", job.status)) == "RUNNING"}
        drivers = {job for job in running if job is not None}
        runs = within(ANSWER_S, gcs, lambda: notices(gcs, drivers))
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
