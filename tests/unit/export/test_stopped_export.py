"""An export that is stopped, killed or loses the run's folder while the job is executed leaves nothing behind, and other exports alone."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep import train
from lockstep.cli.entry import run as run_entry
from lockstep.export import artifact
from tests.forked import Forked
from tests.unit.export.exported_jobs import GATE
from tests.unit.export.test_export import contents, document, exported


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(train(document(tmp_path_factory.mktemp("one"), "Gated"), local=True).folder)


def export_command(run: Path) -> None:
    tempfile.tempdir = None  # of the process that this one is forked from
    sys.argv = ["lockstep", "export", run.name, "--uri", "off", "--storage", str(run.parent)]
    run_entry()


class Waiting:
    """An export whose job waits at a gate, with a folder of its own for temporary files."""

    def __init__(self, trained: Path, tmp_path: Path) -> None:
        self.run = Path(shutil.copytree(trained, tmp_path / "runs" / trained.name))
        self.temporary, gate = tmp_path / "temporary", tmp_path / "gate"
        self.temporary.mkdir()
        os.mkfifo(gate)
        self.before = contents(self.run)
        environment = {**os.environ, "TMPDIR": str(self.temporary), GATE: str(gate)}
        self.process = Forked(export_command, self.run, env=environment)
        while True:
            with suppress(OSError):  # nobody waits yet
                self.gate = os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
                break
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def go_on(self) -> tuple[int, str]:
        """Open the gate; how the command ends, and what it says."""
        os.close(self.gate)
        out, err = self.process.communicate(120)
        return self.process.wait(), out + err

    def left(self) -> list[str]:
        """The temporary files of Lockstep, and what the run's folder has of an export that is not done."""
        found = [*self.temporary.glob("lockstep-*"), *self.run.glob(".export-*")]
        return [path.name for path in found]


@pytest.mark.scenario
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_copy_of_the_weights(trained: Path, tmp_path: Path, sent: signal.Signals) -> None:
    waiting = Waiting(trained, tmp_path)
    assert len(waiting.left()) > 1
    waiting.process.send_signal(sent)
    assert waiting.process.wait(60) == 128 + sent
    assert (waiting.left(), contents(waiting.run)) == ([], waiting.before)


@pytest.mark.scenario
def test_a_process_that_is_killed_leaves_nothing_to_the_next_export(trained: Path, tmp_path: Path) -> None:
    waiting = Waiting(trained, tmp_path)
    waiting.process.kill()
    waiting.process.wait(60)
    assert list(waiting.run.glob(".export-*"))
    exported(waiting.run, form="safetensors")
    assert not list(waiting.run.glob(".export-*"))


@pytest.mark.scenario
def test_an_export_leaves_alone_one_that_is_at_work(trained: Path, tmp_path: Path) -> None:
    waiting = Waiting(trained, tmp_path)
    exported(waiting.run, form="safetensors")
    code, said = waiting.go_on()
    assert code == 0, said
    assert artifact.read(waiting.run / "export" / "pt2" / "final.pt2").step == 4
    assert waiting.left() == []


@pytest.mark.scenario
def test_a_folder_that_is_removed_while_the_job_is_executed_is_not_made_anew(
    trained: Path, tmp_path: Path
) -> None:
    waiting = Waiting(trained, tmp_path)
    shutil.rmtree(waiting.run)
    code, said = waiting.go_on()
    assert (code, said.count("\n")) == (1, 1), said
    assert f"{str(waiting.run)!r} is gone" in said
    assert (waiting.left(), waiting.run.exists()) == ([], False)
