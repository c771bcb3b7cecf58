"""What is known before a run: the call behind `lockstep check`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checks.findings import Finding, Report
from lockstep.checks.preflight import advise, find_initial_weights
from lockstep.clusters.reachability import LOCAL, cluster_address
from lockstep.job.source import check_job_source
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec

if TYPE_CHECKING:
    from lockstep.checks.estimate import Estimate


def check_spec(
    spec: Spec | str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    local: bool = False,
    address: str | None = None,
    uri: str | None = None,
    say: Callable[[Finding], None] | None = None,
) -> Report:
    """Check a run before it is started, in this process, and unless `local` from every node of the cluster that it would join.

    Without a cluster to join none is started. Raises SpecError for a wrong spec, ClusterError where a named cluster does
    not answer; what is wrong with the run is in the report.
    """
    from lockstep.checks.check import check
    from lockstep.checks.findings import advised

    loaded = _loaded(spec, overrides, uri)
    report = check(loaded, say or (lambda finding: None))
    further = [advised("spec", text) for text in advise(loaded)]
    if not local and cluster_address(address) != LOCAL:
        from lockstep.attempts.seen_from_nodes import seen_from_nodes

        further += seen_from_nodes(loaded, address)
    return Report([*further, *report.checks], report.not_reached)


def estimate_spec(spec: Spec | str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Estimate:
    """The memory of a run, measured on one micro-batch of it in this process. Raises LockstepError."""
    from lockstep.checks.estimate import estimate

    return estimate(_loaded(spec, overrides, "off"))


def _loaded(spec: Spec | str | Path | Mapping[str, Any], overrides: Iterable[str], uri: str | None) -> Spec:
    """The spec as a run would take it. Raises SpecError."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    loaded = spec if isinstance(spec, Spec) else load_spec(spec, overrides, uri=uri)
    check_job_source(loaded.job.use)
    return find_initial_weights(loaded)
