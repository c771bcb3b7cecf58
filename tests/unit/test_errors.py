"""One tree of errors, each a line of text that survives the way between processes."""

from __future__ import annotations

import importlib
import pickle
import re
from pathlib import Path

import pytest

from lockstep import errors
from lockstep.errors import FailedAt, JobError, LockstepError, SpecError, nearest
from lockstep.job.frames import place_in_job


def tree(root: type[LockstepError]) -> list[type[LockstepError]]:
    return [root, *(error for child in root.__subclasses__() for error in tree(child))]


ERRORS = [error for error in tree(LockstepError) if error.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[LockstepError]) -> None:
    """G7: Ray sends errors between processes; the person is shown the same line."""
    back = pickle.loads(pickle.dumps(kind("seed: got 'x', wanted a whole number")))
    assert type(back) is kind
    assert str(back) == "seed: got 'x', wanted a whole number"
    assert back.exit_code == kind.exit_code
    assert back.args == ("seed: got 'x', wanted a whole number",)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_with_another_message_keeps_all_that_it_says_of_itself(kind: type[LockstepError]) -> None:
    """The driver reports what failed and where, whatever is added to the line on its way."""
    error = kind("the job failed")
    error.place = FailedAt("job", 7, 1, (3, 4))
    back = pickle.loads(pickle.dumps(error.with_message("the job failed; run 12")))
    assert (type(back), str(back), back.place) == (kind, "the job failed; run 12", error.place)


class TwoArguments(JobError):
    """As a job may derive one."""

    def __init__(self, field: str, size: int) -> None:
        super().__init__(f"{field}: got {size}")
        self.size = size


def test_an_error_that_a_job_derives_arrives_as_what_it_is() -> None:
    """By its own class it could not be read: a worker that sends it would count as lost, and be replaced."""
    error = TwoArguments("length", 5)
    error.place = FailedAt("job", 7, 1, (3, 4))
    for back in (pickle.loads(pickle.dumps(error)), error.with_message("length: got 5")):
        assert (type(back), str(back), back.place) == (JobError, "length: got 5", error.place)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_exit_code_is_2_for_a_wrong_spec_and_1_for_a_failed_run(kind: type[LockstepError]) -> None:
    assert kind.exit_code == (2 if issubclass(kind, SpecError) else 1)


def test_the_drawing_at_the_top_shows_every_error() -> None:
    drawing = (errors.__doc__ or "").partition("A message")[0]
    assert re.findall(r"\b\w+Error\b", drawing) == [kind.__name__ for kind in ERRORS]


def test_nearest_suggests_one_name_or_lists_them_all() -> None:
    assert nearest("worker", ["seed", "workers", "batch"]) == "; did you mean 'workers'?"
    assert nearest("zzz", ["seed", "batch"]) == "; known here: batch, seed"
    assert nearest("zzz", []) == ""


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "theirs"])
def test_a_place_is_in_the_jobs_code_wherever_libraries_lie(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages of the system lie below those of a virtual environment; a folder of any other name is the person's."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"helper_{folder[0]}.py").write_text("def fail():\n    raise ValueError\n")
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    with pytest.raises(ValueError) as raised:
        importlib.import_module(f"helper_{folder[0]}").fail()
    where = place_in_job(raised.value)
    assert (Path(__file__).name in where) == (folder != "theirs"), where
