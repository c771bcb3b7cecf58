"""What breaks that is not the job: tried again, elsewhere or after a pause, with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep import train
from tests.cluster.test_ray_train import columns
from tests.cluster.test_supervisor import ROOT, accounts, in_a_process, left_alone, spec

pytestmark = [
    # Ray and MLflow leave sockets and temporary folders to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


@pytest.mark.exact  # minutes
def test_a_node_whose_device_fails_twice_is_left_out(tmp_path: Path) -> None:
    """Two workers, the same node's ECC error twice, then one worker on the other node: the same bits."""
    told = in_a_process("tests.cluster.failing_device", tmp_path)
    found = json.loads(Path(told["folder"], "attempts.json").read_text())
    assert [account["workers"] for account in found] == [2, 2, 1]
    for account in found[:2]:
        assert "an uncorrectable memory error of the GPU" in account["why"]
    assert found[1]["left_out"] == [told["failing"]]
    assert found[2]["why"] == "finished"
    (warning,) = [text for text in told["warnings"] if "is left out from now on" in text]
    assert told["failing"][:8] in warning
    assert Path(told["folder"], "log.txt").read_text().count(f" warning: {warning}\n") == 1
    assert told["weights_digest"] == left_alone(tmp_path, 12).weights_digest


@pytest.mark.scenario
@pytest.mark.usefixtures("cluster")
def test_a_worker_whose_device_fails_while_it_trains_is_outlived(tmp_path: Path) -> None:
    """Its process ends, and the others go on in theirs with the same bits."""
    faults = tmp_path / "faults"
    faults.mkdir()
    job = {
        "use": "tests.chaos.exposed:ExposedDigits",
        "params": {"width": 4, "pause_s": 0.05, "faults": str(faults)},
    }
    changes = {"length": {"steps": 12}, "workers": {"min": 1, "max": 2}}

    def plant() -> None:
        while not list(tmp_path.glob("runs/*/step-*/manifest.json")):
            time.sleep(0.05)
        (faults / "ecc").touch()

    threading.Thread(target=plant, daemon=True).start()
    result = train(spec(tmp_path, job=job, **changes))
    first, second, *_ = accounts(result)
    assert "an uncorrectable memory error of the GPU" in first["why"]
    assert not first["planned"] and not first["left_out"]
    assert (second["in_memory"], second["workers"]) == (True, 1)
    whole = train(spec(tmp_path / "whole", **changes), local=True)
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)


@pytest.mark.exact  # minutes
def test_a_micro_batch_that_fails_alike_on_two_workers_is_the_jobs(tmp_path: Path) -> None:
    """The worker that met it first is outlived, and the other one meets it then; the run ends, with a file that takes it again."""
    told = in_a_process("tests.cluster.failing_sample", tmp_path)
    assert "fails in the same way on different workers (rank 1 on node " in told["error"]
    assert " in attempt 1 and rank 0 on node " in told["error"]
    (script,) = tmp_path.glob("runs/*/reproduce-step-*.py")
    assert script.name in told["error"]
    assert "Its samples: " in script.read_text()
    again = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 1
    assert "DeviceError: a GPU failed in a kernel (step " in again.stderr


@pytest.mark.exact  # tests/unit/attempts/test_retry_policy.py has the pause, tests/unit/test_failure_kinds.py the kind
@pytest.mark.usefixtures("cluster")
def test_a_full_disk_is_tried_again_after_a_pause(tmp_path: Path) -> None:
    """A real ENOSPC in the job's own code, which used to be the job's mistake and final."""
    job = {
        "use": "tests.cluster.broken_jobs:FullDisk",
        "params": {"width": 4, "file": str(tmp_path / "full")},
    }
    changes = {"length": {"steps": 6}, "workers": {"max": 1}}
    result = train(spec(tmp_path, job=job, **changes))
    first, second = accounts(result)
    assert "a disk or quota is full" in first["why"]
    assert second["began"] - first["ended"] >= 4.0
    whole = train(spec(tmp_path / "whole", **changes), local=True)
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)


@pytest.mark.scenario
@pytest.mark.usefixtures("cluster")
def test_a_disk_that_fails_before_the_first_step_is_tried_again(tmp_path: Path) -> None:
    """It is no mistake of the job's, although the job has trained nowhere yet."""
    job = {
        "use": "tests.cluster.broken_jobs:TornAtFirst",
        "params": {"width": 4, "file": str(tmp_path / "torn")},
    }
    result = train(spec(tmp_path, job=job, length={"steps": 2}, workers={"max": 1}))
    first, second = accounts(result)
    assert first["why"].startswith("data: sample ")
    assert "Input/output error" in first["why"]
    assert second["why"] == "finished"


def flipped(folder: Path, workers: int, *, after: int = 5, **changes: Any) -> dict[str, Any]:
    """Eight steps, saved and compared after each fourth; a bit of rank 1's weights flips after step `after`, and its gradients are wrong from then on."""
    job = {
        "use": "tests.cluster.broken_jobs:FlippedBit",
        "params": {"width": 4, "file": str(folder / "flipped"), "step": after},
    }
    return spec(folder, job=job, length={"steps": 8}, workers={"min": workers, "max": workers}, **changes)


@pytest.mark.exact  # tests/distributed/test_drift.py, without Ray
@pytest.mark.usefixtures("cluster")
def test_a_flipped_bit_is_told_and_its_steps_are_taken_again(tmp_path: Path) -> None:
    """G1 and G4: of three workers the wrong one is named; weights and ledger are those of an uninterrupted run."""
    result = train(flipped(tmp_path, 3))
    first, second = accounts(result)
    assert "rank 1 (host " in first["why"]
    assert "had other weights than the majority of the workers, first in " in first["why"]
    assert first["left_out"] and first["corrupted"]
    assert second["from_step"] == 4
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "flipped").touch()
    whole = train(flipped(tmp_path / "whole", 1), local=True)
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)
    assert "corrupted" in Path(result.folder, "run.json").read_text()


@pytest.mark.exact  # a minute
@pytest.mark.usefixtures("cluster")
def test_of_two_workers_the_second_attempt_tells_which_was_wrong(tmp_path: Path) -> None:
    result = train(flipped(tmp_path, 2, after=8))
    first, second = accounts(result)
    assert "which is wrong cannot be told from these alone: rank 0" in first["why"]
    (told,) = second["corrupted"]
    assert "rank 1 (host " in told
    assert "than when these steps were taken again" in told
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "flipped").touch()
    whole = train(flipped(tmp_path / "whole", 1, after=8), local=True)
    assert result.weights_digest == whole.weights_digest
    assert columns(result) == columns(whole)


@pytest.mark.scenario
def test_every_node_is_measured_with_its_link(tmp_path: Path) -> None:
    """On a real cluster of two nodes; what follows from such figures is in tests/unit/checks/test_machine_health.py."""
    told = in_a_process("tests.cluster.measured_nodes", tmp_path)
    assert sorted(one["node"] for one in told["fleet"]) == sorted(told["nodes"]) and len(told["fleet"]) == 2
    first, second = (one["vitals"] for one in told["fleet"])
    assert first["problem"] == second["problem"] == ""
    assert first["products_per_s"]["cpu"] > 0 and first["digests"] == second["digests"]
    assert second["link"]["bytes_per_s"] > 0 and first["link"]["all_reduce_s"] > 0
    assert abs(second["clock_offset_s"]) <= second["clock_error_s"] + 0.1
