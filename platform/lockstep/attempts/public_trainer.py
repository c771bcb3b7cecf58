"""An attempt through Ray's public `TorchTrainer`, for a Ray version whose private parts Lockstep does not know.

Its controller is an actor, which costs some more processes and cannot be asked for its workers. So each worker hangs on a lifeline, an actor
of the driver: when that is killed, the worker ends itself, even while its training thread hangs; and the driver hears from it
at once when a worker is gone.

On CPUs each worker is a replica group of its own to Ray, which then replaces a lost one alone, while the others go on in memory. Both
views agree: Ray's new worker asks the run's mailbox, which lets it join if the attempt goes on, and has it return if not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig
from ray.train.torch import TorchTrainer

from lockstep.attempts.liveness import end_with, start_lifeline
from lockstep.attempts.mailbox import ANSWER_S, LOST
from lockstep.attempts.process_group import ReplicaTorch
from lockstep.clusters.background import in_background
from lockstep.clusters.bounded_calls import answer_of

LOOK_S = 0.2
"""How often the driver looks for new workers, and whether Ray's controller has ended."""

END_S = 20.0
"""How long Ray's controller may take to end when all workers have. It may wait for a place on a node that is gone."""

GONE = "its process is gone: it was killed from outside or crashed"


def hanging_worker_main(config: dict[str, Any]) -> None:
    """`worker_main` in a process that ends with the lifeline."""
    from lockstep.attempts.worker_main import worker_main

    end_with(config["lifeline"].hold.remote())
    worker_main(config)


def replica_worker_main(config: dict[str, Any]) -> None:
    """`replica_worker.replica_main`, which Ray's controller need not import."""
    from lockstep.attempts.replica_worker import replica_main

    replica_main(config)


class PublicTrainer:
    """Ray's own trainer, with the methods that `DriverTrainer` has beside `fit`. `settings` are those of TorchTrainer."""

    replaces_lost = False
    """Whether Ray starts another worker in the place of a lost one, which joins the others."""

    def __init__(self, config: dict[str, Any], **settings: Any) -> None:
        self._lifeline = start_lifeline()
        self._trainer = TorchTrainer(
            self._function(), train_loop_config={**config, "lifeline": self._lifeline}, **settings
        )

    @staticmethod
    def _function() -> Callable[[dict[str, Any]], None]:
        return hanging_worker_main

    def fit(self) -> None:
        """Train until the attempt ends. Raises Ray's error for an early end."""
        try:
            self._trainer.fit()
        finally:
            self.end_workers()

    def bundles(self) -> tuple[Any, dict[int, int]]:
        """None and {}: Ray does not say where its workers are."""
        return None, {}

    def end_workers(self) -> None:
        """Make the current workers end themselves; the controller treats it as their loss."""
        ray.kill(self._lifeline)


class ReplacingTrainer(PublicTrainer):
    """Ray's own trainer, which replaces a lost worker alone. `lost` gets the number of a lost worker, and says whether the others go on.

    A worker's number is its rank, or what the mailbox gave to one that came in the place of another.
    """

    replaces_lost = True

    def __init__(
        self,
        config: dict[str, Any],
        lost: Callable[[int, str], bool],
        *,
        run: dict[str, Any],
        **settings: Any,
    ) -> None:
        """`run` are the settings of Ray's RunConfig."""
        self._mailbox, self._attempt, self._lost = config["mailbox"], config["origin"].attempt, lost
        # As often as a worker is lost: whether the attempt goes on, the mailbox decides.
        run_config = RunConfig(**{**run, "failure_config": FailureConfig(max_failures=-1)})
        super().__init__(config, run_config=run_config, torch_config=ReplicaTorch("gloo"), **settings)

    @staticmethod
    def _function() -> Callable[[dict[str, Any]], None]:
        return replica_worker_main

    def fit(self) -> None:
        """Train until the attempt ends, however it does: what ended it early is what `lost` was told. Raises Ray's error where no worker could begin."""
        over, errors = threading.Event(), list[Exception]()

        def fit() -> None:
            try:
                self._trainer.fit()
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits
                errors.append(error)
            finally:
                over.set()

        in_background(fit, name="lockstep-ray-train")
        try:
            if self._ended_by_themselves(over):
                over.wait(END_S)  # else Ray would take the end of their processes for a loss
        except LOST:  # without the mailbox no worker goes on
            pass
        finally:
            self.end_workers()
            over.wait(END_S)
        for error in errors:
            raise error

    def _ended_by_themselves(self, over: threading.Event) -> bool:
        """Wait until Ray's controller or all workers have ended: True. False where one was lost without which the others cannot go on."""
        living: dict[Any, int] = {}
        begun = set[int]()
        while not over.is_set():
            slots = answer_of(self._mailbox.slots.remote(self._attempt), "the run's mailbox", ANSWER_S)
            living |= {
                reference: number for number, (reference,) in slots.references.items() if number not in begun
            }
            begun |= slots.references.keys()
            gone, _ = ray.wait([*living], timeout=LOOK_S, fetch_local=False) if living else ([], [])
            if gone:  # it may have ended since
                slots = answer_of(self._mailbox.slots.remote(self._attempt), "the run's mailbox", ANSWER_S)
            for reference in gone:
                number = living.pop(reference)
                if number not in slots.ended and not self._lost(number, GONE):
                    return False
            if begun and slots.ended >= set(living.values()):
                return True
            if not living:
                time.sleep(LOOK_S)
        return True
