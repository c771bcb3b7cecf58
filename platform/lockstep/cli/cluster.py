"""The commands for clusters: `lockstep cluster up | status | down` and `lockstep submit`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from lockstep import printing
from lockstep.cli import problems
from lockstep.cli.command_output import Address, Json, Overrides, Verbose, answered
from lockstep.cli.commands import Groups, command
from lockstep.driver.options import declared

cluster = typer.Typer(
    cls=Groups,
    no_args_is_help=True,
    help="Start Ray nodes on this machine, for testing, and leave a cluster.",
)

NodeId = Annotated[
    str | None,
    typer.Option("--node", help="the Ray node with this id, or its beginning; default: all of this machine"),
]


@command(cluster, None, "lockstep cluster up --nodes 3 --cpus 2")
def up(
    nodes: Annotated[int, typer.Option(min=1, help="number of Ray nodes")] = 3,
    cpus: Annotated[float, typer.Option(min=0, help="logical CPUs of each node")] = 2,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, help="the dashboard's port; 0 for any free port")] = 8265,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="disable authentication; allowed on loopback only")
    ] = False,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Start the nodes, and print how to reach them."""
    with answered(json_, verbose) as answer:
        from lockstep.clusters import local_cluster

        started = local_cluster.up(nodes, cpus, host=host, port=port, token=not no_token)
        report = local_cluster.described(started)
        answer(report, lambda: _reached(report))


@command(cluster, None, "lockstep cluster status")
def status(json_: Json = False, verbose: Verbose = False) -> None:
    """Show nodes, jobs and runs of the cluster that was started here."""
    with answered(json_, verbose) as answer:
        from lockstep.clusters import local_cluster
        from lockstep.clusters.submission import status_of

        local = local_cluster.running_cluster()
        if local is None:
            answer({"running": False}, lambda: "no cluster runs here; start one with lockstep cluster up")
            return
        report = {**local_cluster.described(local), **status_of(local.dashboard, local.address)}
        answer(report, lambda: _status(report))


@command(
    cluster,
    None,
    "lockstep cluster leave --wait",
    "lockstep cluster leave --why maintenance --seconds 300 --wait --stop-runs",
)
def leave(
    address: Address = None,
    node: NodeId = None,
    why: Annotated[str, typer.Option(help="reason shown in Ray")] = "told to leave",
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="seconds until this machine goes; default: unknown"),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="return when nothing runs on the nodes any more")
    ] = False,
    stop_runs: Annotated[
        bool, typer.Option("--stop-runs", help="have the runs whose drivers are on this machine save and end")
    ] = False,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Drain this machine's Ray nodes. Workers there leave their runs, which continue on other nodes."""
    with answered(json_, verbose) as answer:
        from lockstep.clusters.node_departure import leave as drained

        node_ids = drained(address, node, why, seconds, _say, wait=wait, stop_runs=stop_runs)
        answer({"nodes": node_ids}, lambda: f"{len(node_ids)} node{'s' if len(node_ids) > 1 else ''} drained")


@command(cluster, None, "lockstep cluster notices --cloud aws --metadata http://169.254.169.254")
def notices(
    cloud: Annotated[
        str | None, typer.Option(help="the cloud whose metadata service is polled: aws or gcp")
    ] = None,
    metadata: Annotated[
        str | None, typer.Option(help="its address, such as http://169.254.169.254; polled only if given")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="seconds from SIGTERM until this machine goes")] = 55.0,
    address: Address = None,
    node: NodeId = None,
    verbose: Verbose = False,
) -> None:
    """Drain this machine when a termination notice arrives. The agent of a node: it runs until SIGTERM."""
    with answered(as_json=False, verbose=verbose):
        from lockstep.clusters.preemption import Agent, Notice, leave_by_command, sources

        if (cloud is None) != (metadata is None):
            raise problems.NOTICES()
        notice_sources = [] if cloud is None or metadata is None else sources(cloud, metadata)

        def leave_here(notice: Notice, wait: bool) -> None:
            leave_by_command(notice, wait, address=address, node=node)

        Agent(notice_sources, leave_here, grace, _say).run()


@command(cluster, None, "lockstep cluster down")
def down(json_: Json = False, verbose: Verbose = False) -> None:
    """End the cluster that was started here, and nothing else."""
    with answered(json_, verbose) as answer:
        from lockstep.clusters import local_cluster

        ended = local_cluster.down()
        answer(
            {"ended": ended is not None},
            lambda: "ended" if ended else "no cluster was started here",
        )


def submit(
    spec: Annotated[
        str | None, typer.Argument(metavar="SPEC", help="a YAML file, or the id of a run to resume")
    ] = None,
    overrides: Overrides = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray's job API, such as http://127.0.0.1:8265; overrides RAY_API_SERVER_ADDRESS"),
    ] = None,
    run_name: Annotated[
        str | None,
        typer.Option("--run", help="name of the run; submitting the name again resumes the run"),
    ] = None,
    installed: Annotated[
        bool, typer.Option("--installed", help="use the cluster's Lockstep instead of sending this one")
    ] = False,
    retries: Annotated[int, typer.Option(min=0, help=declared("retries").help)] = 3,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help="shell command to run on the cluster at the run's start, failure and end"
        ),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="submit, and return at once")] = False,
    attach: Annotated[
        str | None, typer.Option(metavar="JOB", help="follow this job instead of submitting one")
    ] = None,
    json_: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run on a cluster as a job. Its output is shown here, and its exit code is this command's."""
    with answered(json_, verbose) as answer:
        from lockstep.calls.leased_storages import refuse_held_job
        from lockstep.clusters import submission

        if (spec is None) == (attach is None):
            raise problems.SPEC_OR_JOB()
        if spec is not None:
            refuse_held_job(spec, overrides or [], run_name)
        where = submission.find_address(address)
        job = attach or submission.submit(
            spec or "",
            overrides or [],
            address=where,
            name=run_name,
            installed=installed,
            retries=retries,
            notify=notify,
            say=_say,
        )
        _say(f"job {job}")
        if no_wait:
            ended = submission.look(submission.connect(where), job, where)
        else:
            try:
                ended = submission.follow(job, address=where, write=_show)
            except KeyboardInterrupt:
                _say(f"\nthe job continues; follow it with lockstep submit --attach {job} --address {where}")
                _say(f"stop it with ray job stop {job} --address {where}")
                raise
        answer(ended.as_dict(), lambda: _ended(ended.as_dict()), ended.exit_code)
    if ended.exit_code:
        raise typer.Exit(ended.exit_code)


def _say(text: str) -> None:
    _show(f"{text}\n")


def _show(text: str) -> None:
    from lockstep.driver.progress import display

    with display():
        printing.write(printing.streamed(text), sys.stderr)


def _ended(report: dict[str, Any]) -> str:
    lines = [f"job               {report['job']}: {report['status'].lower()}"]
    if report["exit_code"] is None:
        lines.append(
            f"follow it         lockstep submit --attach {report['job']} --address {report['address']}"
        )
    elif report["exit_code"] and report["message"]:
        lines.append(f"said              {' '.join(report['message'].split())[:300]}")
    if report["run_id"]:
        lines.append(f"run               {report['run_id']}")
        if report["exit_code"]:
            lines.append(f"resume it with    {report['resume']}")
    return "\n".join(lines)


def _reached(report: dict[str, Any]) -> str:
    lines = [f"{report['nodes']} nodes of {report['cpus']:g} CPUs; dashboard {report['dashboard']}"]
    lines += [f"export {name}={value}" for name, value in report["environment"].items()]
    lines.append(f"lockstep submit SPEC --address {report['dashboard']}")
    return "\n".join(lines)


def _status(report: dict[str, Any]) -> str:
    lines = [f"{report['dashboard']}: {sum(node['alive'] for node in report['alive'])} nodes alive"]
    for node in report["alive"]:
        cpus = f"{node['resources'].get('CPU', 0):g} CPUs"
        lines.append(f"  {node['id'][:12]}  {node['address']}  {cpus}{'' if node['alive'] else '  dead'}")
    lines.append(f"{len(report['jobs'])} jobs")
    lines += [f"  {job['id']}  {job['status'].lower()}  {job['entrypoint']}" for job in report["jobs"]]
    lines.append(f"{len(report['runs'])} runs")
    lines += [
        f"  {run['run_id']}  {run['status'].lower()}  {run['name']}  step {run['step']}  {run['workers']} workers"
        for run in report["runs"]
    ]
    return "\n".join(lines)


def register(app: typer.Typer) -> None:
    """Add the commands to `lockstep`."""
    app.add_typer(cluster, name="cluster", rich_help_panel="maintain")
    command(
        app,
        "train",
        "lockstep submit jobs/digits/train.yaml --run night",
        "lockstep submit --attach JOB",
    )(submit)
