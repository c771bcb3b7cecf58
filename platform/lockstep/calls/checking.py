"""What is known before a run: the calls behind `lockstep check`, `estimate`, `bench` and `lr-find`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.calls import problems
from lockstep.checks.findings import Finding, Report
from lockstep.checks.start_checks import advise, find_initial_weights
from lockstep.clusters.reachability import LOCAL, cluster_address
from lockstep.job.job_folder import search_job_folder
from lockstep.job.source import check_job_source
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec, named_store
from lockstep.spec.locations import RECORD_OFF

if TYPE_CHECKING:
    from lockstep.checks.bench import BenchResult
    from lockstep.checks.estimate import Estimate
    from lockstep.checks.lr_finder import RateRange
    from lockstep.record.measurement import Kept


def check_spec(
    spec: Spec | str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    local: bool = False,
    address: str | None = None,
    uri: str | None = None,
    health: bool = False,
    say: Callable[[Finding], None] | None = None,
) -> Report:
    """Check a run before it is started, in this process, and unless `local` from every node of the cluster that it would join; their `health` on request.

    Without a cluster to join none is started. Raises SpecError for a wrong spec, ClusterError where a named cluster does
    not answer; what is wrong with the run is in the report.
    """
    from lockstep.checks.check import check
    from lockstep.checks.findings import advised

    loaded = _loaded(spec, overrides, uri)
    report = check(loaded, say or (lambda finding: None))
    further = [advised("spec", text) for text in advise(loaded)]
    if not local and cluster_address(address) != LOCAL:
        from lockstep.attempts.node_checks import seen_from_nodes

        further += seen_from_nodes(loaded, address, health=health)
    elif health:
        from lockstep.checks.machine_health import findings, judged, measure

        further += findings(judged({"this machine": measure(loaded.folder, threads=loaded.threads)}))
    return Report([*further, *report.checks], report.not_reached)


def estimate_spec(spec: Spec | str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Estimate:
    """The memory of a run, measured on one micro-batch of it in this process. Raises LockstepError."""
    from lockstep.checks.estimate import estimate

    return estimate(_loaded(spec, overrides, "off"))


def bench_spec(
    spec: Spec | str | Path | Mapping[str, Any],
    workers: Sequence[int],
    overrides: Iterable[str] = (),
    *,
    steps: int = 20,
    local: bool = False,
    plot: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> BenchResult:
    """Take the first steps of a run on each number of `workers`, in processes of this machine; `plot` is a figure to write.

    SpecError for a wrong spec, for a cluster that a run would join unless `local` leaves it out, and for numbers that cannot be
    measured; LockstepError for what a worker raises.
    """
    from lockstep.checks import measurement_plots
    from lockstep.checks.bench import bench
    from lockstep.checks.processes import interruptible

    file = None if plot is None else measurement_plots.destination(plot, "bench")
    cluster = LOCAL if local else cluster_address(None)
    if cluster != LOCAL:
        raise problems.BENCH_ON_CLUSTER(got=cluster)
    with interruptible():
        benched = bench(_loaded(spec, overrides, "off"), workers, steps, say or (lambda line: None))
    if file is not None:
        measurement_plots.draw_bench(benched, file)
    return benched


def find_rate(
    spec: Spec | str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
    uri: str | None = None,
    plot: Path | None = None,
) -> tuple[RateRange, Kept | None]:
    """The learning-rate range test of a run, in this process; `plot` is a figure to write.

    Where a store is named, by `uri`, MLFLOW_TRACKING_URI or the spec's `record.uri`, the curve is kept there as a run of its
    own. Raises LockstepError; RecordError before anything is trained where that store does not answer.
    """
    from lockstep.checks import measurement_plots
    from lockstep.checks.lr_finder import lr_find
    from lockstep.checks.run_checks import record_answers
    from lockstep.record.measurement import keep_measurement
    from lockstep.record.mirror.documents import as_json

    file = None if plot is None else measurement_plots.destination(plot, "lr-find")
    override_list = list(overrides)
    loaded = (
        spec
        if isinstance(spec, Spec)
        else load_spec(spec, override_list, uri=named_store(spec, override_list, uri) or RECORD_OFF)
    )
    record_answers(loaded)
    rate_range = lr_find(loaded, lowest=lowest, highest=highest, steps=steps)
    if file is not None:
        measurement_plots.draw_range(rate_range, file)
    if loaded.record.uri in (None, RECORD_OFF):
        return rate_range, None
    measurement = keep_measurement(
        loaded,
        "lr-find",
        rate_range.reasoning,
        curves={
            "lr_find/rate": rate_range.rates,
            "lr_find/loss": rate_range.losses,
            "lr_find/smoothed": rate_range.smoothed,
        },
        texts={"lr-find.json": as_json(rate_range.as_dict())},
        draw=lambda path: measurement_plots.draw_range(rate_range, path),
    )
    return rate_range, measurement


def _loaded(spec: Spec | str | Path | Mapping[str, Any], overrides: Iterable[str], uri: str | None) -> Spec:
    """The spec as a run would take it. Raises SpecError."""
    search_job_folder()
    loaded = spec if isinstance(spec, Spec) else load_spec(spec, overrides, uri=uri)
    check_job_source(loaded.job.use)
    return find_initial_weights(loaded)
