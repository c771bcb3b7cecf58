"""A run whose process has gone is told from one that lives, on this machine at once and elsewhere by its silence."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from lockstep.record.heartbeat import SILENT_S, process_tags, vanished

NOW = time.time()


def test_this_very_process_lives_however_long_it_was_silent() -> None:
    assert vanished(process_tags(NOW - 10 * SILENT_S), NOW) == ""


@pytest.mark.parametrize("reaped", [False, True])
def test_a_killed_process_of_this_machine_is_known_at_once(reaped: bool) -> None:
    script = "import time; from lockstep.record.heartbeat import process_tags; print(process_tags(time.time())['lockstep.process'], flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    tags = {**process_tags(NOW), "lockstep.process": process.stdout.readline().strip()}
    assert vanished(tags, NOW) == ""
    process.send_signal(signal.SIGKILL)
    if reaped:
        process.wait()
    else:
        time.sleep(0.5)  # a zombie has gone as well
    assert vanished(tags, NOW).startswith("the process that recorded it is gone (host ")
    process.wait()
    process.stdout.close()


def test_another_process_with_the_same_id_is_not_taken_for_it() -> None:
    tags = process_tags(NOW)
    place, pid, started = tags["lockstep.process"].split()
    assert vanished({**tags, "lockstep.process": f"{place} {pid} {int(started) + 1}"}, NOW)


@pytest.mark.parametrize("process", ["", "another-boot/pid:[1] 17 99"])
def test_a_process_elsewhere_is_judged_by_its_silence(process: str) -> None:
    tags = {**process_tags(NOW), "lockstep.process": process}
    assert vanished(tags, NOW + SILENT_S - 2) == ""
    assert "nothing was heard for" in vanished(tags, NOW + SILENT_S + 2)


def test_a_run_that_never_said_anything_is_left_alone() -> None:
    assert vanished({}, NOW) == ""
