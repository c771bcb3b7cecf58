"""What is wrong with a view of a recorded run is told as the problem that it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.views import problems, tensorboard, wandb
from tests.raised import raises
from tests.unit.record.rows import step_row
from tests.unit.views.recorded import RUN, curves, record


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_told(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with raises(problems.PACKAGE, package=package):
        {"tensorboard": tensorboard, "wandb": wandb}[package].check_installed()


def test_a_folder_that_takes_no_file_is_told_with_the_option_that_names_it(tmp_path: Path) -> None:
    record(tmp_path, [step_row(1)])
    (tmp_path / "file").touch()
    with raises(problems.UNWRITABLE, option="logdir"):
        tensorboard.write_events(curves(tmp_path), tmp_path / "file" / "logs")
    with raises(problems.UNWRITABLE, option="dir"):
        wandb.write_offline_run(curves(tmp_path), tmp_path / "file" / "wandb")


def test_a_record_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    folder = record(tmp_path, [step_row(1)])
    (folder / "spec.yaml").unlink()
    (folder / "spec.yaml").mkdir()
    with raises(problems.UNREADABLE, run=RUN, folder=folder):
        curves(tmp_path)
