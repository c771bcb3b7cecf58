"""Actors are ended by Ray's word, and one that does not hear it by force; Ray then tells nobody of a worker that died."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from lockstep.clusters.bounded_calls import end_actor


class Idle:
    def process(self) -> int:
        return os.getpid()


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.scenario
def test_an_actor_ends_by_rays_word_and_without(stopped: bool, tmp_path: Path) -> None:
    actor: Any = ray.remote(num_cpus=0)(Idle).remote()
    pid = ray.get(actor.process.remote())
    process = psutil.Process(pid)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    end_actor(actor, pid)
    process.wait(5)
    with pytest.raises(ray.exceptions.ActorDiedError, match=r"ray\.kill"):
        ray.get(actor.process.remote())
