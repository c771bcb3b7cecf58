"""G5, over the years: checkpoints of the format version that is written are read, to the bit, and others are refused as such."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep.checkpoint import problems
from lockstep.checkpoint.layout import MANIFEST, step_folder
from lockstep.checkpoint.manifest import VERSION, Manifest
from lockstep.checkpoint.reader import Checkpoint, load, load_newest, shared_files
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.local import LocalStorage
from tests.raised import raises
from tests.unit.checkpoint.fixture_state import FIXTURE_FACTS, SHARED, fixture_state
from tests.unit.checkpoint.one_process import newest_good
from tests.unit.checkpoint.states import same

FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE = FIXTURES / f"format-{VERSION}"


def test_the_format_has_its_fixture() -> None:
    """A new version brings a new folder in the place of the old one."""
    assert [path.name for path in FIXTURES.iterdir()] == [FIXTURE.name]


def test_a_checkpoint_of_long_ago_is_read_to_the_bit() -> None:
    run = RunFolder.open(LocalStorage(FIXTURE), "fixture")
    found = load_newest(run, pytest.fail)
    assert found is not None and (found.manifest.step, found.manifest.attempt) == (7, 3)
    assert found.manifest.facts == FIXTURE_FACTS
    wanted = fixture_state()
    assert set(found.sections) == set(wanted)
    for name, section in wanted.items():
        assert same(found.sections[name], section), name
    assert list(shared_files(found, pytest.fail)) == list(SHARED.values())


def test_a_run_of_long_ago_goes_on(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "runs")
    run = RunFolder.open(LocalStorage(tmp_path / "runs"), "fixture")
    assert run.claim().number == 4


@pytest.mark.parametrize("other", [VERSION - 1, VERSION + 1])
def test_another_format_is_refused_clearly_and_passed_over(tmp_path: Path, other: int) -> None:
    shutil.copytree(FIXTURE, tmp_path / "runs")
    run = RunFolder.open(LocalStorage(tmp_path / "runs"), "fixture")
    newest = tmp_path / "runs" / "fixture" / step_folder(8)
    shutil.copytree(newest.with_name(step_folder(7)), newest)
    document = json.loads((newest / MANIFEST).read_bytes())
    (newest / MANIFEST).write_text(json.dumps({**document, "step": 8, "version": other}))
    line = f"{MANIFEST}: it has format version {other}, wanted {VERSION}: it was made by another Lockstep"
    with raises(problems.OTHER_FORMAT, got=other, wanted=VERSION):
        load(Checkpoint.of(run, 8))
    told: list[str] = []
    assert newest_good(run, told.append) == Checkpoint.of(run, 7)
    assert len(told) == 1 and line in told[0]


def test_what_is_written_today_is_what_the_fixture_holds() -> None:
    """A change of the format, meant or not, is seen here: it needs a new version and a new fixture."""
    text = (FIXTURE / "fixture" / step_folder(7) / MANIFEST).read_bytes()
    assert Manifest.decode(text).encode() == text
