"""A run under torchrun: `torch.distributed.run … under_torchrun.py SPEC FOLDER` leaves FOLDER/<rank>.pickle.

`launch` is torchrun's own launcher, with workers that are forked: to start interpreters costs many times what the run costs.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lockstep.communication.group import distributed
from tests.distributed.training import train


def launch(spec: str, folder: str, workers: int) -> None:
    config = LaunchConfig(
        1, 1, workers, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork"
    )
    elastic_launch(config, rank)(spec, folder)


def rank(spec: str, folder: str) -> None:
    with distributed("gloo"):
        trained = train(json.loads(spec))
    Path(folder, f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(trained))


if __name__ == "__main__":
    rank(*sys.argv[1:])
