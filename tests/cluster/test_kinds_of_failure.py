"""What breaks that is not the job: tried again, elsewhere or after a pause, with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep import train
from tests.cluster.test_ray_train import columns
from tests.cluster.test_supervisor import accounts, in_a_process, left_alone, spec

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
    assert told["weights_digest"] == left_alone(tmp_path, 12).weights_digest


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
