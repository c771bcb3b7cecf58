"""Sweeps over a job class of the script that runs: its source is recorded, so the sweep is resumed and its trials are verified without the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import sweep
from lockstep.calls.verify import verify
from lockstep.driver.options import RunOptions
from lockstep.errors import JobImportError
from lockstep.sweeps.sweep_resume import resume_sweep
from tests.cluster.test_sweep import ROOT, document, outcome, until

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SCRIPT = """
import json, sys
from pathlib import Path

import lockstep
from tests.cluster.broken_jobs import SlowDigits

class Mine(SlowDigits):
    def loss(self, model, batch):
        return super().loss(model, batch)

class Other: ...

lockstep.sweep(json.loads(Path(sys.argv[1]).read_text()), job=Mine, address="local")
"""


def begun(folder: Path, given: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The script, in a process of its own that hashes strings at random as any does."""
    given["spec"]["job"].pop("use")
    (folder / "sweep.json").write_text(json.dumps(given))
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}"}
    environment.pop("RAY_ADDRESS", None)
    environment.pop("PYTHONHASHSEED", None)
    command = [sys.executable, str(folder / "script.py"), str(folder / "sweep.json")]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


@pytest.mark.exact  # two minutes
def test_a_killed_sweep_of_a_class_of_a_script_ends_as_that_of_a_module(tmp_path: Path) -> None:
    """Two trials of two workers, killed in the second one; the script is gone when it is resumed."""
    changes = {"trials": 2, "concurrency": 1, "spec": {"workers": {"min": 2}}}
    expected = sweep(document(tmp_path / "module", **changes))
    folder = tmp_path / "class"
    folder.mkdir()
    given = document(folder, **changes)
    given["spec"]["job"]["params"]["pause_s"] = 0.1
    process = begun(folder, given)
    kept = 2  # of the first trial
    until(lambda: len(list(folder.glob("runs/*/step-*/manifest.json"))) > kept, process, folder)
    for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        child.kill()
    process.wait()
    (folder / "script.py").unlink()

    sweep_folder = next(folder.glob("runs/*/decisions.jsonl")).parent
    recorded = (sweep_folder / "source" / "lockstep_main.py").read_text()
    assert "class Mine(SlowDigits):" in recorded
    assert "class Other" not in recorded
    where = [f"record.folder={folder}/runs"]
    aside = (sweep_folder / "source").rename(tmp_path / "source")
    with pytest.raises(JobImportError, match="whose source is in the record of its run and nowhere else"):
        resume_sweep(RunOptions(), sweep_folder.name, where, uri="off")
    aside.rename(sweep_folder / "source")

    result = resume_sweep(RunOptions(), sweep_folder.name, where, uri="off")
    assert result is not None
    assert outcome(result) == outcome(expected)
    for trial in result.trials:
        run = Path(result.folder).parent / trial["run_id"]
        assert (run / "source" / "lockstep_main.py").read_text() == recorded
    found = verify(result.trials[1]["run_id"], local=True, uri="off", storage=folder / "runs")
    assert found.same and found.same_bits
