"""One case of a soak: the run left alone, the same run in attempts that end early, and on a group that changes."""

from __future__ import annotations

import os
import signal
import tempfile
from typing import Any, NamedTuple

from lockstep.checkpoint.runs.run_checkpoints import claim
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.errors import LockstepError, SpecError
from tests.distributed.pool import Pool
from tests.distributed.survivors import Change, Fall, outlive, watched
from tests.distributed.training import Trained, train, train_attempt
from tests.soak.cases import Case

RUN = "soak"


class Outcome(NamedTuple):
    """What a case came to."""

    wrong: str
    """What differs from the run left alone, or the error that ended it; empty where all is the same."""
    faults: int
    """Workers killed, attempts stopped, workers joined."""
    refused: tuple[str, ...]
    """Why an attempt was refused before its first step."""

    def line(self) -> str:
        return self.wrong or f"the same, {self.faults} faults"


class Disagreement(Exception):
    """A run that came to other bits than the one left alone."""


def attempt(pool: Pool, case: Case) -> Outcome:
    """Train it in each way. An attempt that is refused for its sharding is tried without."""
    refused: list[str] = []
    faults = 0
    try:
        (alone,) = pool.run(1, train, case["spec"])
        faults += in_attempts(pool, case, alone, refused)
        if case["changes"] is not None:
            faults += on_one_group(case["changes"], case["spec"], alone, refused)
    except Disagreement as error:
        return Outcome(str(error), faults, tuple(refused))
    except Exception as error:  # noqa: BLE001 - told as the case's outcome
        notes = "\n".join(getattr(error, "__notes__", ()))
        return Outcome(f"{type(error).__name__}: {error}\n{notes}", faults, tuple(refused))
    return Outcome("", faults, tuple(refused))


def in_attempts(pool: Pool, case: Case, alone: Trained, refused: list[str]) -> int:
    """The run in the attempts of the case: how many of them were ended."""
    ended = 0
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        begun = False
        for each in case["attempts"]:
            document = {
                **case["spec"],
                "checkpoint": {"storage": folder, "every": {"steps": case["save_every"]}},
                "sharding": each["sharding"],
            }
            document["data"] = {**document["data"], "loader_processes": each["loader_processes"]}
            fall = Fall(*each["fall"]) if "fall" in each else None
            trained = _one_attempt(pool, document, each, fall, folder, begun, refused)
            begun = True
            if trained is None:
                ended += 1
                continue
            last = max(row_step(row) for row in trained.rows)
            ended += "stop_after" in each and last == each["stop_after"]
            compare(trained, alone, f"attempt {each}", whole=last == len(alone.rows))
    return ended


def _one_attempt(
    pool: Pool, document: Case, each: Case, fall: Fall | None, folder: str, begun: bool, refused: list[str]
) -> Trained | None:
    """What rank 0 came to; None where the attempt was killed."""
    origin = claim(folder, RUN, None) if begun else AttemptOrigin()
    try:
        if fall is None:
            answers = pool.run(each["workers"], train_attempt, document, RUN, origin, each.get("stop_after"))
        else:
            answers = pool.run(each["workers"], train_until_killed, document, RUN, origin, fall)
        trained: Trained = answers[0]
        return trained
    except SpecError as error:
        if document["sharding"] == "none":
            raise
        refused.append(str(error)[:120])
        return _one_attempt(pool, {**document, "sharding": "none"}, each, fall, folder, begun, refused)
    except (RuntimeError, LockstepError) as error:
        if fall is None or not _of_a_loss(error):
            raise
    return None


def _of_a_loss(error: Exception) -> bool:
    """Whether a worker of the pool was killed, as this error or one of another rank says."""
    told = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return f"ended with {-signal.SIGKILL}" in told


def train_until_killed(document: Case, run_id: str, origin: AttemptOrigin, fall: Fall) -> Trained:
    """An attempt in which one rank kills itself at a place, if it comes to it."""
    rank = int(os.environ["POOL_RANK"])
    with watched([fall] if fall.worker == rank else [], [], [], lambda: None):
        return train_attempt(document, run_id, origin)


def on_one_group(changes: Case, spec: Case, alone: Trained, refused: list[str]) -> int:
    """The run on one group that loses workers, and may gain some: how many."""
    falls = [Fall(*fall) for fall in changes["falls"]]
    coming = [Change(changes["joining"][0], joining=changes["joining"][1])] if changes["joining"] else []
    try:
        document = {
            **spec,
            "sharding": changes["sharding"],
            "faults": {"mirror": changes["sharding"] == "optimizer"},
        }
        outlived = outlive(document, changes["workers"], falls, coming)
    except SpecError as error:
        if changes["sharding"] == "none":
            raise
        refused.append(str(error)[:120])
        return on_one_group({**changes, "sharding": "none"}, spec, alone, refused)
    digests = {summary["weights_digest"] for summary in outlived.summaries.values()}
    for name, got, wanted in (
        ("weights", digests, {alone.weights_digest}),
        ("rows", outlived.rows, alone.rows),
        ("evaluations", outlived.evaluations, alone.evaluations),
    ):
        if got != wanted:
            raise Disagreement(f"{name} of {changes}")
    lost = changes["workers"] + (changes["joining"] or [0, 0])[1] - len(outlived.summaries)
    return lost + bool(coming)


def compare(trained: Trained, alone: Trained, where: str, *, whole: bool) -> None:
    """Disagreement where the rows so far, or the weights at the end, are others."""
    if trained.rows != alone.rows[: len(trained.rows)]:
        raise Disagreement(f"rows of {where}")
    if trained.evaluations != alone.evaluations[: len(trained.evaluations)] and whole:
        raise Disagreement(f"evaluations of {where}")
    if whole and (trained.weights_digest, trained.best) != (alone.weights_digest, alone.best):
        raise Disagreement(f"weights of {where}")


def row_step(row: Any) -> int:
    """The step of a row of `Trained`."""
    return int(dict(row)["step"])
