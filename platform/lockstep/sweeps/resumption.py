"""A sweep that is taken up again: it is held first, and only then what goes on with it is imported."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.checkpoint.holder import Hold, holding
from lockstep.checkpoint.local_storage import LocalStorage
from lockstep.driver.options import RunOptions
from lockstep.errors import SpecError
from lockstep.record.stores import find_sweep
from lockstep.spec.loading import load_spec
from lockstep.spec.sweep import SweepSpec, load_sweep

if TYPE_CHECKING:
    from lockstep.sweeps.driver import SweepResult


def resume_sweep(
    options: RunOptions,
    sweep_id: str,
    overrides: Iterable[str] = (),
    *,
    uri: str | None = None,
    takeover: bool = False,
) -> SweepResult | None:
    """Go on with the sweep of this id; None where the run is no sweep. `overrides` may say where it lies (`record.folder`).

    SpecError where another command works on the sweep, unless it is taken over.
    """
    given = list(overrides)
    where = load_spec(
        {"job": {"use": "any:Job"}}, [o for o in given if o.startswith(("record.", "checkpoint."))], uri=uri
    )
    store = where.record.uri or ""
    document = find_sweep(store, sweep_id, where.folder)
    if document is None:
        return None
    if options.local or options.chaos is not None:
        raise SpecError("resume: a sweep runs on Ray, and kills nothing; leave out --local and --chaos")
    document["spec"]["record"] = {**document["spec"].get("record", {}), "uri": store}
    spec = load_sweep(document, [f"spec.{override}" for override in given])
    with held_sweep(spec, sweep_id, takeover=takeover) as hold:
        from lockstep.proof.recorded_run import recorded_main
        from lockstep.sweeps.driver import run_sweep

        return run_sweep(replace(options, source=recorded_main(spec.base, sweep_id)), spec, sweep_id, hold)


def held_sweep(spec: SweepSpec, sweep_id: str, *, takeover: bool = False) -> AbstractContextManager[Hold]:
    """Hold a sweep where its decisions lie: in the folder of the record."""
    return holding(LocalStorage(spec.base.folder), sweep_id, f"sweep {sweep_id}", takeover=takeover)
