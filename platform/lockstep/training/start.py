"""From which checkpoint an attempt starts, and how its state is restored.

What is read is compared with what it should be: the identity of the run, the facts that follow from its counters, and the
digests of its state, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any, NamedTuple

from lockstep.checkpoint.errors import BadCheckpointError, LostFileError
from lockstep.checkpoint.manifest import Facts, FileEntry
from lockstep.checkpoint.reader import (
    ByRows,
    Checkpoint,
    Loaded,
    load_newest,
    load_step,
    locations_in,
    shared_files,
)
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.interface import Storage
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.checkpoint.tensor_file import TensorLocation
from lockstep.communication.group import Group
from lockstep.data.table_pins import pins_of
from lockstep.errors import StorageError
from lockstep.job.identity import FIRST_MICRO_BATCH, differences, shown
from lockstep.plan import Plan
from lockstep.randomness import digest64, step_key
from lockstep.record.events.union import Segment
from lockstep.record.ledger.history import History
from lockstep.spec.fields import Spec
from lockstep.training import problems
from lockstep.training.identity_inputs import differing
from lockstep.training.integrity.digests import Digester, state_digests
from lockstep.training.integrity.state_digest import tree_digest
from lockstep.training.read_relay import read_once
from lockstep.training.state import Best, TrainState


class Start(NamedTuple):
    """The checkpoint that an attempt starts from; a `fork` takes it from another run."""

    loaded: Loaded
    fork: bool
    exact: bool = False
    """Whether a fork takes over the whole state, as a resume does."""

    def without_state(self) -> Start:
        """A copy without the sections, for when they are restored: they would stay in memory for as long as the run."""
        return self._replace(loaded=self.loaded._replace(sections={}))

    @property
    def facts(self) -> Facts:
        return self.loaded.manifest.facts

    @property
    def parent(self) -> str | None:
        """For a fork, the identity and step of the run that it started from, which are part of its own identity; else None."""
        if self.fork:
            how = " exact" if self.exact else ""
            return f"{self.facts.identity}@{self.loaded.manifest.step}{how}"
        parent: str | None = self.facts.identity_fields.get("fork")
        return parent


def find_start(
    spec: Spec, group: Group, origin: AttemptOrigin | None, warn: Callable[[str], None]
) -> Start | None:
    """The checkpoint to start from, the same on every rank; None for a start from the beginning."""
    load = partial(_load, group=group, warn=warn, is_sharded=spec.is_fully_sharded(group.size))
    if origin is not None and origin.replay is not None and origin.replay.step:
        replay = origin.replay
        replayed = load(replay.storage, replay.run_id, replay.step)
        return Start(replayed, fork=False) if replayed is not None else None
    if origin is not None and origin.run_id is not None:
        resumed = load(spec.checkpoint.storage, origin.run_id, origin.step)
        if resumed is not None:
            return Start(resumed, fork=False)
    if spec.fork is None:
        return None
    loaded = load(spec.fork.storage or spec.checkpoint.storage, spec.fork.run, spec.fork.step)
    if loaded is None:
        raise problems.FORK_EMPTY(run=spec.fork.run)
    return Start(loaded, fork=True, exact=spec.fork.exact)


def versions_of(start: Start | None, origin: AttemptOrigin | None) -> Mapping[str, str]:
    """The versions in which a run reads its changing tables, by their names: those of the checkpoint that it starts from, a fork too, or those that its record has."""
    if start is not None:
        return pins_of(start.facts.identity_fields)
    return {} if origin is None else origin.table_versions


def _load(
    storage: str,
    run_id: str,
    step: int | None,
    group: Group,
    warn: Callable[[str], None],
    *,
    is_sharded: bool = False,
) -> Loaded | None:
    """A run's checkpoint of `step`, or its newest good one. Rank 0 reads it, and every rank verifies what it receives.

    Where the parameters are sharded (`is_sharded`), their tensors stay in their files: each rank reads its rows of them when it restores the state.
    """
    store = open_storage(storage)
    by_rows = ByRows(_SHARDED, store, partial(verified_together, group, store)) if is_sharded else None
    with read_once(store, group) as relayed:
        folder = RunFolder.open(relayed, run_id)
        loaded = load_newest(folder, warn, by_rows) if step is None else load_step(folder, step, by_rows)
    # Later reads come from one rank alone, so they must not go through the relay.
    return loaded and loaded._replace(checkpoint=replace(loaded.checkpoint, storage=store))


_SHARDED = frozenset({"model", "optimizer", "ema", "best", "evaluation"})
"""The sections whose tensors are sharded."""


def verified_together(
    group: Group, store: Storage, checkpoint: Checkpoint, files: Sequence[FileEntry]
) -> list[dict[str, TensorLocation]]:
    """Where the tensors of each file lie. Each rank reads some of the files, about as many bytes as the others, and holds none of them."""
    checkpoint = replace(checkpoint, storage=store)
    loads = [0] * group.size
    mine: dict[str, dict[str, TensorLocation]] = {}
    failed: StorageError | None = None
    for entry in sorted(files, key=lambda entry: (-entry.size, entry.name)):
        rank = min(range(group.size), key=loads.__getitem__)
        loads[rank] += entry.size
        if rank == group.rank and failed is None:
            try:
                mine[entry.name] = locations_in(checkpoint, entry)
            except StorageError as error:
                failed = error
    every = group.gather((mine, failed))
    if errors := [error for _, error in every if error is not None]:
        # A store that cannot be reached comes first: it is no reason to pass a checkpoint over.
        raise min(errors, key=lambda error: isinstance(error, BadCheckpointError | LostFileError))
    places = {name: of_file for of_rank, _ in every for name, of_file in of_rank.items()}
    return [places[entry.name] for entry in files]


def check_identity(start: Start, fields: Mapping[str, Any], hints: str = "") -> None:
    """SpecError for the first value in which the identity of a resumed run differs from that of the run that was saved. A fork may differ.

    `fields` are completed by what was saved: see `inputs.continued`. `hints` is told where nothing but the first micro-batch differs.
    """
    if start.fork:
        return
    for name, was, now in differing(start.facts.identity_fields, fields):
        advice = _ADVICE.get(name, "put it back")
        if name == FIRST_MICRO_BATCH and hints:
            advice += f" (the job asks for {hints})"
        raise problems.OTHER_IDENTITY(name=name, got=shown(now), wanted=shown(was), remedy=advice)


_ADVICE = {
    **dict.fromkeys(
        ("numerics_probe", "numerics_probe.numpy"), "go on with it on a machine of the same kind"
    ),
    FIRST_MICRO_BATCH: "the first micro-batch of the run gives another loss or gradient here, though nothing differs that the identity names: "
    "look for a file that the job reads, a library, or a clock, and put it back",
}


def judges_anew(start: Start, fields: Mapping[str, Any]) -> bool:
    """Whether a fork compares other evaluations than its parent did: by another metric, or on other data. The parent's best is none of its own then."""
    if not start.fork or start.exact:
        return False
    differing = (difference.name for difference in differences(start.facts.identity_fields, fields))
    return any(name in _JUDGED or name.startswith("data.eval") for name in differing)


_JUDGED = ("early_stop.metric", "early_stop.mode")


def check_facts(spec: Spec, plan: Plan, state: TrainState) -> dict[str, Any]:
    """What follows from the counters, saved beside them as a check: where the data, the schedule and the generators stand."""
    counters = state.counters
    return {
        "global_batch": plan.global_batch if plan.is_constant else [astuple(size) for size in plan.sizes],
        "steps_per_epoch": plan.steps_per_epoch,
        "rate_factor": state.schedule.standing(counters.updates),
        "draw": digest64(step_key(spec.seed, counters.step, 0)),
    }


def compare_check(saved: dict[str, Any], now: dict[str, Any], shown: str) -> None:
    """StorageError where a value of `now` differs from the one that was saved under the same name."""
    for name in now:
        if now[name] != saved.get(name):
            raise problems.OTHER_POSITION(
                checkpoint=shown, name=name, wanted=repr(saved.get(name)), got=repr(now[name])
            )


def restore(
    start: Start, spec: Spec, plan: Plan, state: TrainState, warn: Callable[[str], None] | None = None
) -> History:
    """Restore the state from the checkpoint. Returns the rows up to it; for a fork, which did not take those steps, none.

    Rank 0 reports the rows: it passes `warn`, and reads the files that the checkpoint shares.
    """
    sections = start.loaded.sections
    saved: Any = sections["check"]
    current = check_facts(spec, plan, state)
    for name, unit in (("global_batch", "batch.global"), ("steps_per_epoch", "the number of steps an epoch")):
        if saved[name] != current[name]:
            raise problems.FORK_PLACE(name=unit, got=current[name], wanted=saved[name])
    was = start.facts.identity_fields.get("optimizer.name")
    if start.fork and was not in (None, spec.optimizer.name):  # their states may have the same parts
        raise problems.FORK_OPTIMIZER(got=repr(was))
    state.restore(sections, fork=start.fork and not start.exact)
    if start.fork:
        return History(reached=state.counters.step)
    current = check_facts(spec, plan, state)
    if "weights_digest" in saved:
        current |= state_digests(Digester(state.precision.device), state)
    compare_check(saved, current, start.loaded.checkpoint.shown)
    segments = [Segment.of(*astuple(segment)) for segment in start.loaded.manifest.shared]
    contents = shared_files(start.loaded, warn) if warn is not None else ()
    return History.restored(sections, segments, contents)


def restore_on_every_rank(
    start: Start,
    spec: Spec,
    plan: Plan,
    state: TrainState,
    group: Group,
    fields: dict[str, Any] | None,
    warn: Callable[[str], None],
    hints: str = "",
) -> History:
    """Compare the identity `fields` with those of the checkpoint, restore the state, and compare it between the ranks.

    `fields` is None for a replay, which compares them itself. Returns the rows that `restore` does.
    """
    if fields is not None:
        check_identity(start, fields, hints)
    history = restore(start, spec, plan, state, warn if group.rank == 0 else None)
    if fields is not None and judges_anew(start, fields):
        state.best = Best()
    check_same_state(group, state)
    return history


def check_same_state(group: Group, state: TrainState) -> None:
    """DriftError where the ranks hold different states after a restore, down to the last bit of the optimizer."""
    if group.size == 1:
        return
    digests = group.gather(tree_digest(state.sections()))
    strays = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if strays:
        raise problems.RESTORED_OTHERWISE(step=state.counters.step, ranks=strays)
