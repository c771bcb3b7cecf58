"""A sweep that is taken up again: it is held first, and only then what goes on with it is imported."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.checkpoint.runs.lease import Lease, leased
from lockstep.checkpoint.storage.local import LocalStorage
from lockstep.driver.options import RunOptions
from lockstep.errors import RecordError
from lockstep.job.identity import changed_fields, shown
from lockstep.job.recorded_source import imported_from
from lockstep.record.mirror.documents import flat
from lockstep.record.mirror.run_store import SWEEP_FILE
from lockstep.record.mirror.stores import find_sweep, reader
from lockstep.record.redaction import redacted_fields
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.sweep import SweepSpec, load_sweep
from lockstep.sweeps import problems

if TYPE_CHECKING:
    from lockstep.sweeps.driver import SweepResult

_FREE = {"name", "concurrency", "budget"}
"""Fields of a sweep that change neither its trials nor what they are compared by."""

_UNCUT = 250
"""Stores keep parameters of so many characters whole."""


def resume_sweep(
    options: RunOptions,
    sweep_id: str,
    overrides: Iterable[str] = (),
    *,
    uri: str | None = None,
    takeover: bool = False,
    step: int | None = None,
    fork: bool = False,
) -> SweepResult | None:
    """Go on with the sweep of this id; None where the run is no sweep, or the store has none of this id. `overrides` may change placement, such as where it lies (`record.folder`).

    SpecError where another command works on the sweep, unless it is taken over; where `overrides` change the bits of its trials; and
    for a `step` or a `fork`, which only a run has.
    """
    override_list = list(overrides)
    where = load_spec(
        {"job": {"use": "any:Job"}},
        [o for o in override_list if o.startswith(("record.", "checkpoint."))],
        uri=uri,
    )
    store = where.record.uri or ""
    try:
        document = find_sweep(store, sweep_id, where.folder)
    except RecordError:  # the store has no run of this id
        return None
    if document is None:
        return None
    if options.local or options.chaos is not None:
        raise problems.LOCAL_OR_CHAOS()
    if fork or step is not None:
        raise problems.FORK_OR_STEP(sweep=sweep_id)
    document["spec"]["record"] = {**document["spec"].get("record", {}), "uri": store}
    recorded_spec = load_spec(document["spec"])
    spec = load_sweep(document, [f"spec.{override}" for override in override_list])
    with leased_sweep(spec, sweep_id, takeover=takeover) as lease:
        from lockstep.proof.recorded_run import recorded_main

        source = recorded_main(spec.base, sweep_id)
        with imported_from(source) if source else nullcontext():
            _refuse_changes(sweep_id, recorded_spec, spec.base)
        _refuse_edits(sweep_id, spec)
        from lockstep.sweeps.driver import run_sweep

        return run_sweep(replace(options, source=source), spec, sweep_id, lease)


def _refuse_changes(sweep_id: str, recorded: Spec, spec: Spec) -> None:
    """SpecError for the first field that would change the bits of the trials, and for a secret that the record has not and nobody gives."""
    for name in redacted_fields({**spec.document(), "record": {}}):
        raise problems.SECRET_FIELD(field=name, sweep=sweep_id)
    hidden = redacted_fields(recorded.document())
    for name, old, new in changed_fields(recorded, spec):
        if not any(name.startswith(field) for field in hidden):
            raise problems.FIELD_CHANGED(field=name, sweep=sweep_id, wanted=shown(old), got=shown(new))


def _refuse_edits(sweep_id: str, spec: SweepSpec) -> None:
    """SpecError for the first field in which the sweep's file differs from the parameters that its run was given when it began.

    Only names that both have are compared, but for `trials`, which may be left out: a store may write some names otherwise.
    """
    try:
        recorded = reader(spec.base.record.uri or "", spec.base.folder).run(sweep_id).params
    except RecordError:  # one without a run cannot be opened, which is told then
        return
    if "seed" not in recorded:  # its driver was killed before it was given any
        return
    now = flat({name: value for name, value in spec.document().items() if name != "spec"})
    for name in sorted({name for name in now if name in recorded} | {"trials"}):
        wanted, got = recorded.get(name, "none"), now.get(name, "none")
        is_cut = len(wanted) >= _UNCUT
        if name.partition(".")[0] not in _FREE and got != wanted and not is_cut:
            raise problems.FILE_CHANGED(field=name, sweep=sweep_id, file=SWEEP_FILE, wanted=wanted, got=got)


def leased_sweep(spec: SweepSpec, sweep_id: str, *, takeover: bool = False) -> AbstractContextManager[Lease]:
    """Hold a sweep where its decisions lie: in the folder of the record."""
    return leased(LocalStorage(spec.base.folder), sweep_id, f"sweep {sweep_id}", takeover=takeover)
