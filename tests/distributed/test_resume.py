"""G1 over interruption: a run that is taken up from a checkpoint comes to the bits of the undisturbed one.

A checkpoint is all that an attempt hands on to the next: each case takes a run up from the state that one worker
saved after some step, with other workers and loader processes. What is compared is all of `Trained`: the ledger and
the evaluations from the first step on, weights, best weights, identity; and the model after each step that was taken.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from lockstep.checkpoint.problems import OVER
from lockstep.checkpoint.reader import Checkpoint, checkpoints, load_newest, shared_files
from lockstep.checkpoint.runs.run_folder import AttemptOrigin, RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import SpecError
from lockstep.record.ledger import segments
from lockstep.record.ledger.history import History
from lockstep.record.ledger.tables import DETERMINISTIC
from lockstep.training import problems
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.state import TrainState
from tests.distributed import test_fp16, test_same_bits
from tests.distributed.covering import covering, pairs, showing_each_value
from tests.distributed.pool import Pool
from tests.distributed.training import Document, Trained, bits, train, train_attempt
from tests.raised import raises
from tests.unit.checkpoint.conftest import s3  # noqa: F401

RUN = "run"

FACTORS = {
    "job": ("digits", "gpt", "overflowing", "stopped early"),
    "precision": ("fp32", "bf16", "fp16"),
    "workers": (1, 2, 3, 4),
    "loader_processes": (0, 2),
    "point": ("inside the warm-up", "in the middle", "after an evaluation", "before the end", "at the end"),
}


class Case(NamedTuple):
    """A run, where it is taken up, and by whom."""

    job: str
    precision: str
    workers: int
    loader_processes: int
    point: str


COVERING = [
    *(Case(*row) for row in covering(FACTORS)),  # type: ignore[arg-type]
    Case(
        "gpt", "fp16", 4, 0, "before the end"
    ),  # the one step that is left leaves a worker without a micro-batch
]
EACH_VALUE = showing_each_value(COVERING)
PRODUCT = [Case(*row) for row in product(*FACTORS.values())]  # type: ignore[arg-type]


def document(job: str, precision: str = "fp32", **more: Any) -> Document:
    """The runs of the other matrix; one whose loss scaler skips a step; one that early stopping ends; one with a buffer that
    `state_dict` leaves out, and that the forward pass reads.
    """
    if job == "overflowing":
        return {**test_fp16.ONE_BOMB, "precision": precision, **more}
    if job == "unlisted buffer":
        centred = test_same_bits.centred()
        centred["job"]["params"]["listed"] = False
        return {**centred, "precision": precision, **more}
    if job == "stopped early":
        early: Document = {
            "optimizer": {"lr": 0.03},
            "length": {"epochs": 6},
            "evaluate": {"every": {"steps": 2}},
            "early_stop": {"metric": "eval/loss", "patience": 2},
        }
        return test_same_bits.document("digits", 6, precision, **{**early, **more})
    return test_same_bits.document(job, 6, precision, **more)


def step_at(point: str, whole: Trained) -> int:
    total = len(whole.rows)
    evaluated = whole.evaluations[0][0] if whole.evaluations else total // 3
    return {
        "inside the warm-up": 1,
        "in the middle": total // 2,
        "after an evaluation": evaluated,
        "before the end": total - 1,
        "at the end": total,
    }[point]


@cache
def undisturbed(job: str, precision: str) -> Trained:
    return train(document(job, precision))


class SavedRuns:
    """Each run once with every step's checkpoint, made by one worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: set[str] = set()

    def storage(self, job: str, precision: str = "fp32") -> str:
        """Where the run's checkpoints are. Saving has changed no bit of it."""
        storage = str(self._folder / f"{job}-{precision}")
        if storage not in self._made:
            spec = document(
                job, precision, checkpoint={"storage": storage, "every": {"steps": 1}, "keep_every": 1}
            )
            whole = undisturbed(job, precision)
            assert train_attempt(spec, RUN, AttemptOrigin()) == whole
            assert [found.step for found in checkpoints(folder(storage))] == [*range(len(whole.rows), 0, -1)]
            self._made.add(storage)
        return storage


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedRuns:
    return SavedRuns(tmp_path_factory.mktemp("saved"))


def folder(storage: str) -> RunFolder:
    return RunFolder.open(open_storage(storage), RUN)


def taken_up(storage: str, step: int | None) -> AttemptOrigin:
    """The next attempt of the run, from the checkpoint of `step`."""
    return AttemptOrigin(RUN, folder(storage).claim().number, step)


def check(pool: Pool, saved: SavedRuns, case: Case) -> None:
    whole, storage = undisturbed(case.job, case.precision), saved.storage(case.job, case.precision)
    step = step_at(case.point, whole)
    spec = document(case.job, case.precision, checkpoint={"storage": storage, "every": None, "keep_every": 1})
    spec["data"] = {**spec["data"], "loader_processes": case.loader_processes}
    for rank, trained in enumerate(pool.run(case.workers, train_attempt, spec, RUN, taken_up(storage, step))):
        assert trained.digests == whole.digests[step:]
        assert trained.weights_digest == whole.weights_digest
        assert (trained.best, trained.identity) == (whole.best, whole.identity)
        assert trained.summary["metrics"] == whole.summary["metrics"]
        if rank == 0:  # the ledger is kept there
            assert (trained.rows, trained.evaluations) == (whole.rows, whole.evaluations)


def name(case: Case) -> str:
    return "-".join(map(str, case))


@pytest.mark.scenario
@pytest.mark.thinned(5)
@pytest.mark.parametrize("case", EACH_VALUE, ids=name)
def test_a_run_goes_on_with_the_same_bits(pool: Pool, saved: SavedRuns, case: Case) -> None:
    """G1 over interruption, every value of every factor."""
    check(pool, saved, case)


@pytest.mark.exact
@pytest.mark.parametrize("case", PRODUCT, ids=name)
def test_a_run_goes_on_with_the_same_bits_in_full(pool: Pool, saved: SavedRuns, case: Case) -> None:
    """G1 over interruption, the full product."""
    check(pool, saved, case)


def test_covering_set_shows_every_pair() -> None:
    assert set().union(*map(pairs, COVERING)) == set().union(*map(pairs, PRODUCT))


@pytest.mark.scenario
def test_the_matrix_holds_what_it_says() -> None:
    assert undisturbed("overflowing", "fp16").summary["skipped"] == 1
    early = undisturbed("stopped early", "fp32")
    assert [step for step, _, _ in early.evaluations] == [2, 4, 6, 8, 10, 12]
    assert early.best[0] == 8
    assert len(early.rows) == 12 < 6 * 4


@pytest.mark.scenario
def test_four_attempts_in_a_row(pool: Pool, tmp_path: Path) -> None:
    """Each is asked to stop, saves where it stands, and the next has other workers."""
    whole = undisturbed("digits", "fp32")
    spec = document("digits", checkpoint={"storage": str(tmp_path), "every": None})
    for attempt, (workers, stop) in enumerate([(2, 2), (3, 4), (1, 5), (4, None)]):
        origin = taken_up(str(tmp_path), None) if attempt else AttemptOrigin()
        # Steps are counted within an attempt where it is asked to stop.
        trained = pool.run(workers, train_attempt, spec, RUN, origin, stop)[0]
        assert trained.rows == whole.rows[: stop or None]
    assert trained == Trained(**{**vars(trained), "digests": whole.digests[5:]})
    assert (trained.rows, trained.evaluations, trained.weights_digest, trained.best) == (
        whole.rows, whole.evaluations, whole.weights_digest, whole.best,
    )  # fmt: skip


@pytest.mark.scenario
def test_a_run_of_several_segments_comes_to_the_same_ledger(tmp_path: Path) -> None:
    """G4: three attempts, whose checkpoints name the segments of the attempts before."""
    whole = undisturbed("digits", "fp32")
    spec = document("digits", checkpoint={"storage": str(tmp_path), "every": {"steps": 1}})
    with mock.patch.object(segments, "SEGMENT_STEPS", 2):
        train_attempt(spec, RUN, AttemptOrigin(), 3)
        train_attempt(spec, RUN, taken_up(str(tmp_path), None), 4)
        rest = train_attempt(spec, RUN, taken_up(str(tmp_path), None))
    newest = load_newest(folder(str(tmp_path)), pytest.fail)
    assert newest is not None and len(newest.manifest.shared) == len(whole.rows) // 2
    rows = History.whole(newest.sections, shared_files(newest, pytest.fail))
    found = [bits({name: getattr(row, name) for name in DETERMINISTIC}) for row in rows.steps]
    assert tuple(found) == whole.rows
    assert tuple((row.step, row.epoch, bits(row.metrics)) for row in rows.evaluations) == whole.evaluations
    assert (rest.weights_digest, rest.evaluations) == (whole.weights_digest, whole.evaluations)


def test_an_evaluation_that_a_stop_put_off_is_made_first(tmp_path: Path) -> None:
    """A run asked to stop at an epoch's end saves at once; the next attempt evaluates before it trains."""
    whole = undisturbed("digits", "fp32")
    at = whole.evaluations[0][0]
    spec = document("digits", checkpoint={"storage": str(tmp_path), "every": None})
    stopped = train_attempt(spec, RUN, AttemptOrigin(), at)
    assert stopped.evaluations == ()
    rest = train_attempt(spec, RUN, taken_up(str(tmp_path), None))
    assert (rest.rows, rest.evaluations, rest.best) == (whole.rows, whole.evaluations, whole.best)


# --- when, and which stay ---------------------------------------------------------------------------------


@pytest.mark.every(6)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exact)])
@pytest.mark.parametrize(
    ("cadence", "kept"),
    [
        ({"every": {"steps": 3}, "keep_last": 2}, [6, 8]),
        ({"every": {"epochs": 1}, "keep_last": 5}, [4, 8]),
        ({"every": {"steps": 1}, "keep_last": 1, "keep_every": 3}, [3, 6, 8]),
        ({"every": None}, [8]),
        ({"every": {"seconds": 1e-9}, "keep_last": 3}, [6, 7, 8]),
        ({"every": {"seconds": 1e9}}, [8]),
    ],
)
def test_cadence_and_retention(
    pool: Pool, tmp_path: Path, cadence: dict[str, Any], kept: list[int], workers: int
) -> None:
    spec = document("digits", checkpoint={"storage": str(tmp_path), **cadence})
    assert len(undisturbed("digits", "fp32").rows) == 8
    pool.run(workers, train_attempt, spec, RUN, AttemptOrigin())
    assert sorted(found.step or 0 for found in checkpoints(folder(str(tmp_path)))) == kept


@pytest.mark.parametrize(
    ("keep_best", "delay"), [({"metric": "eval/loss"}, 0), ({"metric": "eval/loss"}, 1), (None, 1)]
)
def test_the_best_is_kept(tmp_path: Path, keep_best: Document | None, delay: int) -> None:
    """Also where it is known only a step later. The control keeps the last one alone."""
    rule = {"storage": str(tmp_path), "every": {"steps": 1}, "keep_last": 1, "keep_best": keep_best}
    evaluate = {"every": {"steps": 2}, "delay": delay}
    spec = document("stopped early", checkpoint=rule, evaluate=evaluate, rehearsal="off")
    trained = train_attempt(spec, RUN, AttemptOrigin())
    best, last = trained.best[0], len(trained.rows)
    assert best < last
    kept = sorted(found.step or 0 for found in checkpoints(folder(str(tmp_path))))
    assert kept == ([best, last] if keep_best else [last])


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("workers", "after_best"), [(1, 0), (2, 1)])
def test_the_best_is_kept_whenever_saves_are_due(
    pool: Pool, tmp_path: Path, workers: int, after_best: int
) -> None:
    """A state is saved once it is evaluated and the best so far, also where a stop has put off its evaluation. The control keeps no best."""
    whole = undisturbed("stopped early", "fp32")
    best, last = whole.best[0], len(whole.rows)
    assert 0 < best < last - 1

    def kept(**more: Any) -> list[int]:
        storage = str(tmp_path / str(len(more)))
        rule = {"storage": storage, "every": None, "keep_last": 1, **more}
        spec = document("stopped early", checkpoint=rule)
        pool.run(workers, train_attempt, spec, RUN, AttemptOrigin(), best + after_best)
        pool.run(workers, train_attempt, spec, RUN, taken_up(storage, None))
        return sorted(found.step or 0 for found in checkpoints(folder(storage)))

    assert kept(keep_best={"metric": "eval/loss"}) == [best, last]
    assert kept() == [last]


# --- what breaks when a part of the state is left out ------------------------------------------------------


def forget(part: str) -> Callable[[dict[str, Any]], None]:
    """Takes `part` of the saved state away, as `section` or `section.name`, in favour of a fresh run's."""
    fresh: dict[str, Any] = {
        "skipped": 0, "samples": 0, "weight_exponent": None, "evaluated": 0,
        "value": None, "step": 0, "evaluations_since": 0, "weights": None,
    }  # fmt: skip

    def change(sections: dict[str, Any]) -> None:
        section, _, inner = part.partition(".")
        sections[section] = {**sections[section], inner: fresh[inner]}

    change.__name__ = f"without_{part}"
    return change


def resumed_without(
    change: Callable[[dict[str, Any]], None], job: str, precision: str, saved: str, step: int, aside: Path
) -> Trained:
    """The run taken up in this process, from a state that was tampered with: `aside`, for it saves its own end."""
    whole_restore = TrainState.restore
    storage = str(shutil.copytree(saved, aside / "saved"))

    def restore(self: TrainState, sections: dict[str, Any], *, fork: bool = False) -> None:
        tampered = dict(sections)
        change(tampered)
        whole_restore(self, tampered, fork=fork)

    spec = document(job, precision, checkpoint={"storage": storage, "every": None, "keep_every": 1})
    with (
        mock.patch.object(TrainState, "restore", restore),
        mock.patch("lockstep.training.start.compare_check"),
    ):
        return train_attempt(spec, RUN, taken_up(storage, step))


def without_optimizer(sections: dict[str, Any]) -> None:
    sections["optimizer"] = {**sections["optimizer"], "state": {}}


def without_scaler(sections: dict[str, Any]) -> None:
    scaler = {**sections["scaler"]["scaler"], "scale": 65536.0}
    sections["scaler"] = {**sections["scaler"], "scaler": scaler}


def without_buffers(sections: dict[str, Any]) -> None:
    state = {
        name: torch.full_like(tensor, 1) if "running" in name else tensor
        for name, tensor in sections["model"]["state"].items()
    }
    sections["model"] = {**sections["model"], "state": state}


def without_unlisted_buffers(sections: dict[str, Any]) -> None:
    fresh = {name: torch.zeros_like(tensor) for name, tensor in sections["model"]["unlisted_buffers"].items()}
    sections["model"] = {**sections["model"], "unlisted_buffers": fresh}


def without_metrics(sections: dict[str, Any]) -> None:
    sections["metrics"] = {}


def one_step_on(sections: dict[str, Any]) -> None:
    sections["counters"] = {**sections["counters"], "step": sections["counters"]["step"] + 1}


@pytest.mark.every(14)
@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    ("change", "job", "precision", "step"),
    [
        (without_optimizer, "digits", "fp32", 3),
        (without_buffers, "digits", "fp32", 3),
        (without_unlisted_buffers, "unlisted buffer", "fp32", 3),
        (
            without_metrics,
            "digits",
            "fp32",
            8,
        ),  # the last step: what the run has to tell is in the checkpoint alone
        (one_step_on, "digits", "fp32", 3),
        (without_scaler, "overflowing", "fp16", 4),
        (forget("counters.skipped"), "overflowing", "fp16", 4),
        (forget("counters.samples"), "digits", "fp32", 3),
        (forget("counters.weight_exponent"), "gpt", "fp16", 3),
        (forget("counters.evaluated"), "stopped early", "fp32", 10),
        (forget("best.value"), "stopped early", "fp32", 10),
        *(
            pytest.param(forget(part), "stopped early", "fp32", 10, marks=pytest.mark.scenario)
            for part in ("best.step", "best.weights", "best.evaluations_since")
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_part_of_the_state_left_out_shows(
    saved: SavedRuns,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    job: str,
    precision: str,
    step: int,
) -> None:
    """The negative control: the same comparison, and it fails."""
    whole, storage = undisturbed(job, precision), saved.storage(job, precision)
    resumed = resumed_without(change, job, precision, storage, step, tmp_path)
    assert everything(resumed) != (*everything(whole)[:-1], whole.digests[step:])


@pytest.mark.every(3)
@pytest.mark.parametrize(("job", "step"), [("digits", 3), ("digits", 8), ("unlisted buffer", 3)])
def test_with_nothing_left_out_it_does_not(saved: SavedRuns, tmp_path: Path, job: str, step: int) -> None:
    """The control of the negative control."""
    whole, storage = undisturbed(job, "fp32"), saved.storage(job)
    resumed = resumed_without(lambda sections: None, job, "fp32", storage, step, tmp_path)
    assert everything(resumed) == (*everything(whole)[:-1], whole.digests[step:])


def everything(run: Trained) -> tuple[Any, ...]:
    """All that a resumed run has to have in common with the undisturbed one, but for the digests of steps before."""
    metrics = bits(run.summary["metrics"])
    return (run.rows, run.evaluations, run.best, run.weights_digest, metrics, run.digests)


def test_a_state_that_is_not_the_counters_is_refused(saved: SavedRuns) -> None:
    """What follows from the counters is stored as a check."""
    storage = saved.storage("digits")
    whole_restore = TrainState.restore

    def restore(self: TrainState, sections: dict[str, Any], *, fork: bool = False) -> None:
        tampered = dict(sections)
        one_step_on(tampered)
        whole_restore(self, tampered, fork=fork)

    spec = document("digits", checkpoint={"storage": storage, "every": None, "keep_every": 1})
    with (
        mock.patch.object(TrainState, "restore", restore),
        raises(problems.OTHER_POSITION, name="rate_factor"),
    ):
        train_attempt(spec, RUN, taken_up(storage, 3))


# --- damage, identity, forks ------------------------------------------------------------------------------


def flip_a_bit(storage: Path, step: int) -> str:
    """Damage the model of this checkpoint; the file's name."""
    (file,) = (storage / RUN / f"step-{step:09d}").glob("model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file.name


@pytest.mark.scenario
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(pool: Pool, tmp_path: Path) -> None:
    """G5: the one before it is used, and the bits are the same."""
    whole = undisturbed("digits", "fp32")
    spec = document("digits", checkpoint={"storage": str(tmp_path), "every": {"steps": 2}, "keep_every": 1})
    train_attempt(spec, RUN, AttemptOrigin(), 6)
    name = flip_a_bit(tmp_path, 6)
    resumed = pool.run(2, train_attempt, spec, RUN, taken_up(str(tmp_path), None))[0]
    assert len(resumed.warnings) == 1, resumed.warnings
    (warning,) = resumed.warnings
    assert name in warning
    assert "passed over" in warning
    assert (resumed.rows, resumed.weights_digest) == (whole.rows, whole.weights_digest)
    assert resumed.digests == whole.digests[4:]


@pytest.mark.scenario
def test_a_damaged_checkpoint_takes_no_good_ones_place(tmp_path: Path) -> None:
    """G5: a run that passes over its newest two keeps what it saves, and what it started from."""
    storage = {"storage": str(tmp_path), "keep_last": 2}
    spec = document("digits", checkpoint={**storage, "every": {"steps": 2}})
    train_attempt({**spec, "checkpoint": {**spec["checkpoint"], "keep_last": 3}}, RUN, AttemptOrigin(), 6)
    flip_a_bit(tmp_path, 4)
    flip_a_bit(tmp_path, 6)
    often = document("digits", checkpoint={**storage, "every": {"steps": 1}})
    train_attempt(often, RUN, taken_up(str(tmp_path), None), 3)
    assert [found.step for found in checkpoints(folder(str(tmp_path)))] == [6, 4, 3, 2]
    newest = load_newest(folder(str(tmp_path)), lambda text: None)
    assert newest is not None and newest.manifest.step == 3
    rest = train_attempt(often, RUN, taken_up(str(tmp_path), None))
    assert rest.rows == undisturbed("digits", "fp32").rows
    assert [found.step for found in checkpoints(folder(str(tmp_path)))] == [8, 7]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"seed": 4}, r"^resume: .* is .* and was .* in the run.*--fork$"),
        ({"clip_norm": 2.0}, r"^resume: clip_norm is 2\.0 and was 1\.0 in the run"),
    ],
)
def test_another_identity_is_refused(saved: SavedRuns, more: Document, told: str) -> None:
    storage = saved.storage("digits")
    spec = document("digits", checkpoint={"storage": storage, "keep_every": 1}, **more)
    with pytest.raises(SpecError, match=told):
        train_attempt(spec, RUN, taken_up(storage, 3))


def test_a_fork_starts_from_the_state_with_other_hyperparameters(
    pool: Pool, saved: SavedRuns, tmp_path: Path
) -> None:
    """Its steps go on from the parent's; with nothing changed they are the parent's own."""
    whole, storage = undisturbed("digits", "fp32"), saved.storage("digits")
    fork = {"run": RUN, "step": 5, "storage": storage}
    spec = document("digits", checkpoint={"storage": str(tmp_path), "every": None}, fork=fork)
    equal = pool.run(2, train_attempt, spec, "fork", AttemptOrigin())[0]
    assert equal.digests == whole.digests[5:]
    assert equal.rows == whole.rows[5:]
    assert equal.identity != whole.identity
    other = {**spec, "optimizer": {"lr": 5e-4}, "checkpoint": {"storage": str(tmp_path / "2"), "every": None}}
    changed = train_attempt(other, "fork", AttemptOrigin())
    assert [row.step for row in changed.steps] == [row.step for row in equal.steps]
    assert [row.lr for row in changed.steps] == [row.lr / 2 for row in equal.steps]
    assert changed.weights_digest != whole.weights_digest


def test_a_fork_goes_on_from_its_own_checkpoint(saved: SavedRuns, tmp_path: Path) -> None:
    storage = saved.storage("digits")
    fork = {"run": RUN, "step": 3, "storage": storage}
    spec = document("digits", checkpoint={"storage": str(tmp_path), "every": None}, fork=fork, clip_norm=0.5)
    whole = train_attempt({**spec, "checkpoint": {"storage": str(tmp_path / "whole")}}, RUN, AttemptOrigin())
    train_attempt(spec, RUN, AttemptOrigin(), 2)
    rest = train_attempt(spec, RUN, taken_up(str(tmp_path), None))
    assert (rest.rows, rest.weights_digest, rest.identity) == (
        whole.rows,
        whole.weights_digest,
        whole.identity,
    )


def test_a_longer_fork_extends_a_finished_run(saved: SavedRuns, tmp_path: Path) -> None:
    storage = saved.storage("digits")
    fork = {"run": RUN, "storage": storage}
    spec = document("digits", checkpoint={"storage": str(tmp_path)}, fork=fork, length={"epochs": 3})
    extended = train_attempt(spec, RUN, AttemptOrigin())
    assert [row.step for row in extended.steps] == [9, 10, 11, 12]


@pytest.mark.every(2)
@pytest.mark.parametrize("changed", ["nothing", "metric", "data"])
def test_a_fork_that_compares_other_evaluations_begins_to_judge_anew(
    saved: SavedRuns, tmp_path: Path, changed: str
) -> None:
    """The parent's loss is no accuracy, and none of other data: its patience is not used up. Where nothing changed, it is."""
    given = document("stopped early")
    spec: Document = {
        **given,
        "checkpoint": {"storage": str(tmp_path), "every": None},
        "fork": {"run": RUN, "storage": saved.storage("stopped early")},
    }
    if changed == "metric":
        spec["early_stop"] = {**given["early_stop"], "metric": "eval/accuracy", "mode": "max"}
    if changed == "data":
        spec["job"]["params"]["eval_samples"] -= 1
    trained = train_attempt(spec, "fork", AttemptOrigin())
    if changed == "nothing":
        assert trained.steps == ()
        return
    first, parents_best = int(trained.evaluations[0][0]), 8
    assert int(trained.best[0]) >= first > parents_best


def test_a_fork_of_another_batch_is_refused(saved: SavedRuns, tmp_path: Path) -> None:
    fork = {"run": RUN, "step": 3, "storage": saved.storage("digits")}
    spec = document(
        "digits", checkpoint={"storage": str(tmp_path)}, fork=fork, batch={"global": 60, "micro": 5}
    )
    with raises(problems.FORK_PLACE, name="batch.global", got=60, wanted=30):
        train_attempt(spec, RUN, AttemptOrigin())


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_fork_with_another_optimizer_is_refused(saved: SavedRuns, tmp_path: Path, name: str) -> None:
    """Adam's state has the parts of AdamW's."""
    fork = {"run": RUN, "step": 3, "storage": saved.storage("digits")}
    spec = document("digits", checkpoint={"storage": str(tmp_path)}, fork=fork, optimizer={"name": name})
    with raises(problems.FORK_OPTIMIZER, got="'adamw'"):
        train_attempt(spec, RUN, AttemptOrigin())


def test_a_stale_attempt_publishes_nothing_and_ends(tmp_path: Path) -> None:
    """G5: a newer attempt has begun; the older one cannot publish and says so."""
    spec = document("digits", checkpoint={"storage": str(tmp_path), "every": {"steps": 2}, "keep_every": 1})
    train_attempt(spec, RUN, AttemptOrigin(), 4)
    stale = taken_up(str(tmp_path), None)
    taken_up(str(tmp_path), None)
    with raises(OVER, attempt=2, run="run"):
        train_attempt(spec, RUN, stale)
    assert [found.step for found in checkpoints(folder(str(tmp_path)))] == [4, 2]


def test_a_save_that_fails_ends_no_run(tmp_path: Path) -> None:
    """The run's folder cannot be made: it is told, and the run comes to its end."""
    (tmp_path / "file").write_text("no folder")
    spec = document(
        "digits",
        checkpoint={"storage": str(tmp_path / "file" / "runs"), "every": {"steps": 4}},
        record={"folder": str(tmp_path)},  # the final weights go there
    )
    trained = train_attempt(spec, RUN, AttemptOrigin())
    assert trained == undisturbed("digits", "fp32")
    assert trained.summary["checkpoint"] is None
    assert len(trained.warnings) == 3  # of steps 4, 8 and the end
    assert all("could not be saved" in text for text in trained.warnings)
    assert [(row.uri, row.nbytes) for row in trained.checkpoints] == [(None, 0)] * 3
    assert trained.summary["unsaved"].startswith("the checkpoint of step ")


def test_a_save_that_fails_before_one_that_goes_well_is_forgotten(tmp_path: Path) -> None:
    """The folder of the checkpoints can be made from the second save on."""
    spec = document(
        "digits",
        checkpoint={"storage": str(tmp_path / "file" / "runs"), "every": {"steps": 4}},
        record={"folder": str(tmp_path)},
    )
    (tmp_path / "file").write_text("no folder")
    with mock.patch.object(Checkpoints, "_failed", _then(Checkpoints._failed, (tmp_path / "file").unlink)):
        trained = train_attempt(spec, RUN, AttemptOrigin())
    assert len(trained.warnings) == 1
    assert trained.summary["unsaved"] == "" and trained.summary["checkpoint"] is not None


def _then(call: Callable[..., None], also: Callable[[], None]) -> Callable[..., None]:
    """`call`, and something else after it."""

    def both(*given: Any) -> None:
        call(*given)
        also()

    return both


@pytest.mark.scenario
def test_a_job_keeps_state_of_its_own(saved: SavedRuns, tmp_path: Path) -> None:
    """`Job.state_dict`: what the job counts itself goes on."""
    spec = {
        "job": {"use": "tests.distributed.small_jobs:Counting", "params": {"samples": 48}},
        "rehearsal": "off",  # it counts its micro-batches, which the rehearsal refuses
        "batch": {"global": 16, "micro": 4},
        "length": {"epochs": 2},
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": 1}, "keep_every": 1},
    }
    whole = train_attempt(spec, RUN, AttemptOrigin())
    resumed = train_attempt(
        {**spec, "checkpoint": {**spec["checkpoint"], "every": None}}, RUN, taken_up(str(tmp_path), 2)
    )
    assert (resumed.rows, resumed.weights_digest) == (whole.rows, whole.weights_digest)
    assert Checkpoint.of(folder(str(tmp_path)), 2).manifest().facts.counters["step"] == 2
    whole_restore = TrainState.restore

    def without_job(self: TrainState, sections: dict[str, Any], *, fork: bool = False) -> None:
        whole_restore(self, {**sections, "job": {}}, fork=fork)

    with mock.patch.object(TrainState, "restore", without_job):
        other = train_attempt(
            {**spec, "checkpoint": {**spec["checkpoint"], "every": None}}, RUN, taken_up(str(tmp_path), 2)
        )
    assert other.weights_digest != whole.weights_digest


@pytest.mark.scenario
def test_ranks_that_restore_different_states_are_told_before_the_first_step(
    pool: Pool, tmp_path: Path
) -> None:
    """Beside it the same job alone, and one whose state is the same everywhere."""
    spec = {
        "job": {"use": "tests.distributed.small_jobs:Astray", "params": {"samples": 48}},
        "rehearsal": "off",  # it counts its micro-batches, which the rehearsal refuses
        "batch": {"global": 16, "micro": 4},
        "length": {"steps": 4},
        "checkpoint": {"storage": str(tmp_path), "every": {"steps": 2}, "keep_every": 1},
    }
    train_attempt(spec, RUN, AttemptOrigin())
    train_attempt(spec, RUN, taken_up(str(tmp_path), 2))
    with raises(problems.RESTORED_OTHERWISE, step=2, ranks=[1]):
        pool.run(2, train_attempt, spec, RUN, taken_up(str(tmp_path), 2))


@pytest.mark.exact  # tests/unit/cli/test_two_starts.py, with one worker
def test_a_run_is_saved_in_and_taken_up_from_an_object_store(
    pool: Pool,
    tmp_path: Path,
    s3: str,  # noqa: F811
) -> None:
    """Two workers save into a bucket, three take the run up from it."""
    whole = undisturbed("digits", "fp32")
    storage = f"s3://key:secret@runs/{tmp_path.name}?{s3}"
    kept = {"storage": storage, "every": {"steps": 2}}
    spec = document("digits", checkpoint=kept, record={"folder": str(tmp_path)})
    pool.run(2, train_attempt, spec, RUN, AttemptOrigin(), 5)
    assert [found.step for found in checkpoints(folder(storage))] == [5, 4]
    resumed = pool.run(3, train_attempt, spec, RUN, taken_up(storage, None))[0]
    assert (resumed.rows, resumed.evaluations, resumed.best) == (whole.rows, whole.evaluations, whole.best)
    assert resumed.weights_digest == whole.weights_digest
    assert resumed.summary["checkpoint"] is not None
    assert "secret" not in resumed.summary["checkpoint"]


@pytest.mark.scenario
@pytest.mark.parametrize(
    "each", [[(2, 1), (1, 6)], pytest.param([(3, 3)], marks=pytest.mark.exact)], ids=["two", "at its end"]
)
def test_a_step_schedule_goes_on_inside_its_warm_up_and_after(
    pool: Pool, tmp_path: Path, each: list[tuple[int, int]]
) -> None:
    """The rate is a function of the updates done: taken up in the warm-up, at its end, and amid the falls."""
    schedule = {"name": "step", "warmup_steps": 3, "every": 2, "gamma": 0.5}
    kept = {"storage": str(tmp_path), "every": {"steps": 1}, "keep_every": 1}
    whole = train_attempt(document("digits", schedule=schedule, checkpoint=kept), RUN, AttemptOrigin())
    assert len({row.lr for row in whole.steps}) > 4
    rest = document("digits", schedule=schedule, checkpoint={**kept, "every": None})
    for workers, step in each:
        resumed = pool.run(workers, train_attempt, rest, RUN, taken_up(str(tmp_path), step))[0]
        assert (resumed.rows, resumed.weights_digest) == (whole.rows, whole.weights_digest)
