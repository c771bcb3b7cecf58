"""G1: what a job takes from its process and machine and no spec names is refused, in the identity, or told by name where it changed; nothing else is."""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.runs.run_folder import AttemptOrigin, Replay
from lockstep.cli.proofs import as_text
from lockstep.errors import LockstepError
from lockstep.proof.recorded_run import RecordedRun
from lockstep.proof.replaying import replay_here
from lockstep.proof.run_diff import Unwatched
from lockstep.proof.step_spans import Span
from lockstep.proof.verification import Verified, verify
from lockstep.spec.loading import load_spec
from lockstep.training import problems
from tests.distributed.outside_kinds import HONEST, KINDS, Kind, source, text, undo
from tests.distributed.pool import Pool
from tests.distributed.test_resume import taken_up
from tests.distributed.training import Document, Trained, train, train_attempt
from tests.raised import raises
from tests.unit.job.test_source import forget

RUN = "run"


# Jobs here leave files to the garbage collector, as jobs do.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    """They are closed before other tests begin."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
        subprocess._cleanup()  # of programs that a job has started and forgotten


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for folder in ("project", "elsewhere", "site-packages"):
        (tmp_path / folder).mkdir()
    folders = [str(tmp_path / name) for name in ("project", "elsewhere", "site-packages")]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    yield tmp_path
    monkeypatch.undo()  # of variables too, before the time zone is set by them
    undo()
    forget(tmp_path)


def document(project: Path, **data: Any) -> Document:
    return {
        "job": {"use": "job_of_outside:Mine"},
        "batch": {"global": 4, "micro": 2},
        "data": {"shuffle": "none", **data},
        "length": {"steps": 4},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "rehearsal": "off",
        "checkpoint": {"storage": str(project / "runs"), "every": {"steps": 4}},
    }


def attempt(project: Path, stop_after: int | None, **data: Any) -> Trained:
    """As in another process: the first attempt, or the next one from the newest checkpoint."""
    forget(project)
    origin = taken_up(str(project / "runs"), None) if (project / "runs").exists() else AttemptOrigin()
    return train_attempt(document(project, **data), RUN, origin, stop_after)


def taken() -> list[Any]:
    module: Any = sys.modules["job_of_outside"]
    return list(module.TAKEN)


def begin(project: Path, kind: Kind, patch: pytest.MonkeyPatch) -> None:
    (project / "project" / "job_of_outside.py").write_text(source(kind.code, kind.where))
    kind.before(project, patch)


pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.mark.every(31)
@pytest.mark.thinned(15)
@pytest.mark.parametrize("name", KINDS)
def test_what_changed_is_seen(project: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    begin(project, kind, monkeypatch)
    attempt(project, 2)
    before = taken()
    kind.change(project, monkeypatch)
    try:
        lines = attempt(project, None).warnings
    except LockstepError as error:
        lines = (str(error),)
    assert taken()[-1] != before[-1], "the change changes nothing"
    assert [line for line in lines if re.search(kind.told, line)], lines


@pytest.mark.every(13)
@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", HONEST)
def test_what_matters_not_is_silent(project: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = HONEST[name]
    begin(project, kind, monkeypatch)
    first = attempt(project, 2)
    kind.change(project, monkeypatch)
    rest = attempt(project, None)
    assert [*first.warnings, *rest.warnings] == []
    assert rest.identity == first.identity


def test_a_loader_process_that_reads_a_file_has_it_compared(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other process reads it."""
    code = "if os.getppid() != self.parent: TAKEN.append((HERE.parent / 'vocabulary.txt').read_text())"
    begin(
        project,
        Kind(code, lambda project, patch: None, "", text("vocabulary.txt", "1.5"), where="in_fetch"),
        monkeypatch,
    )
    attempt(project, 2, loader_processes=1)
    assert attempt(project, 3, loader_processes=1).warnings == ()
    (project / "vocabulary.txt").write_text("2.5")
    (line,) = attempt(project, None, loader_processes=1).warnings
    assert re.match(
        r"resume: file\.\S+/vocabulary\.txt is \w+ and was \w+ in the run; if the job computes with it", line
    )


def test_the_refusal_of_another_first_micro_batch_names_what_the_job_asks_for(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import time\nSCALE = time.monotonic()"
    begin(project, Kind(code, lambda project, patch: None, ""), monkeypatch)
    job = project / "project" / "job_of_outside.py"
    job.write_text(job.read_text().replace("* scale", "* SCALE"))
    attempt(project, 2)
    with raises(
        problems.OTHER_IDENTITY,
        name="first_micro_batch",
        remedy=re.compile(r"\(the job asks for .*time\.monotonic \(job_of_outside\.py:\d+\)\)"),
    ):
        attempt(project, None)


def on_a_worker(project: str, data: dict[str, Any]) -> Trained:
    """In a process of the pool, in a folder of its own if the project has one for its rank."""
    import torch.distributed as dist

    own = Path(project) / f"rank{dist.get_rank()}"
    folder = own if own.exists() else Path(project) / "project"
    sys.path.insert(0, str(folder))
    try:
        return train({**document(Path(project), **data), "checkpoint": {"storage": f"{project}/runs"}})
    finally:
        sys.path.remove(str(folder))
        forget(Path(project))


@pytest.mark.scenario
def test_a_file_that_differs_between_workers_is_refused_by_name(
    pool: Pool, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(
        "TAKEN.append((HERE / 'config.json').read_text())",
        lambda project, patch: None,
        "",
        text("project/config.json", "1.5"),
    )
    begin(project, kind, monkeypatch)
    for rank in (0, 1):
        shutil.copytree(project / "project", project / f"rank{rank}")
    assert len({one.identity for one in pool.run(2, on_a_worker, str(project), {})}) == 1
    (project / "rank1" / "config.json").write_text("2.5")
    with raises(
        problems.IDENTITIES_DIFFER,
        name="file.config.json",
        rank=1,
        remedy="the job reads it: give every worker the same file",
    ):
        pool.run(2, on_a_worker, str(project), {})


@pytest.mark.scenario
def test_a_cache_that_one_worker_makes_for_all_is_no_difference(
    pool: Pool, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to come makes it, and whoever comes later finds it."""
    code = "import torch\nif not (HERE / 'cache.pt').exists():\n torch.save(torch.ones(2), HERE / 'part.pt'); os.replace(HERE / 'part.pt', HERE / 'cache.pt')\nTAKEN.append(float(torch.load(HERE / 'cache.pt')[0]))"
    begin(project, Kind(code, lambda project, patch: None, ""), monkeypatch)
    assert (
        len(
            {
                one.identity
                for one in pool.run(1, on_a_worker, str(project), {})
                + pool.run(2, on_a_worker, str(project), {})
            }
        )
        == 1
    )


def test_a_verification_tells_what_was_taken_otherwise(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kind = KINDS["elsewhere"]
    begin(project, kind, monkeypatch)
    spec, replay = (
        load_spec({**document(project), "record": {"uri": "off"}}),
        Replay(RUN, str(project / "runs"), 0, 4),
    )
    found = replay_here(spec, replay, Unwatched())
    run = RecordedRun(RUN, spec, found.steps, found.evaluations, found.fields, {}, [], [], facts=found.facts)
    aside = tmp_path_factory.mktemp("aside")

    def again() -> Verified:
        forget(project)
        return verify(
            run, [Span(0, 4)], lambda spec, replay, watch, _: replay_here(spec, replay, watch), aside
        )

    same = again()
    assert (same.same_bits, same.facts) == (True, [])
    kind.change(project, monkeypatch)
    other = again()
    assert not other.same_bits
    assert re.match(r"file\.\S+/vocabulary\.txt was '\w+' and is '\w+'", str(other.cause))
    assert "taken otherwise   file." in as_text(other)
