"""A run on two nodes with a micro-batch that fails like a broken GPU on either of them, told in `told.json`.

python -m tests.cluster.failing_sample FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lockstep import train
from lockstep.errors import JobError
from tests.cluster.failing_device import two_nodes
from tests.cluster.test_supervisor import spec


def main(folder: Path) -> None:
    with two_nodes():
        job = {
            "use": "tests.cluster.broken_jobs:FailingSample",
            "params": {"width": 4, "file": str(folder / "failing")},
        }
        error = ""
        try:
            train(spec(folder, job=job, length={"steps": 12}, workers={"min": 1, "max": 2}))
        except JobError as failed:
            error = str(failed)
        (folder / "told.json").write_text(json.dumps({"error": error}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
