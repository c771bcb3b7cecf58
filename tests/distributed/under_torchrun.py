"""A run under torchrun: `torch.distributed.run … under_torchrun.py SPEC FOLDER` leaves FOLDER/<rank>.pickle."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

from lockstep.training.group import distributed
from tests.distributed.training import train

if __name__ == "__main__":
    with distributed("gloo"):
        trained = train(json.loads(sys.argv[1]))
    Path(sys.argv[2], f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(trained))
