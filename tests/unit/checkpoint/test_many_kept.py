"""What a save costs does not grow with the checkpoints that are kept."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lockstep.checkpoint import layout
from lockstep.checkpoint.manifest import Facts, Manifest
from lockstep.checkpoint.pruning import Catalogue
from lockstep.checkpoint.reader import load_newest
from lockstep.checkpoint.retention import Keep
from lockstep.checkpoint.runs.run_checkpoints import whole_steps
from lockstep.checkpoint.runs.run_folder import Attempt, RunFolder
from lockstep.checkpoint.saver import AsyncSaver
from lockstep.checkpoint.storage.opening import open_storage
from tests.unit.checkpoint.one_process import write_checkpoint
from tests.unit.checkpoint.states import state

KEEP = Keep(last=2, metric="eval/loss", every=10)


@contextmanager
def requests() -> Iterator[Counter[str]]:
    """What is asked of the server, by method. What it is asked again, because it was slow to answer, counts once."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication

    counted: Counter[str] = Counter()
    lock, real = threading.Lock(), DomainDispatcherApplication.__call__

    def call(self, environ, start_response):  # type: ignore[no-untyped-def]
        if environ["HTTP_AMZ_SDK_REQUEST"].startswith("attempt=1"):
            with lock:
                counted[environ["REQUEST_METHOD"]] += 1
        return real(self, environ, start_response)

    DomainDispatcherApplication.__call__ = call  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        DomainDispatcherApplication.__call__ = real  # type: ignore[method-assign]


def filled(uri: str, kept: int) -> Attempt:
    """A run with so many checkpoints, put into the server's memory as a run would have saved them."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    run = RunFolder.create(open_storage(uri), "run-a")
    attempt = run.claim()
    first = write_checkpoint(attempt, 10, state(10), Facts(metrics={"eval/loss": 1.0}))
    found = first.manifest()
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    prefix = uri.partition("://")[2].partition("/")[2].partition("?")[0]
    content = {entry.name: run.storage.read(first.path(entry.name)) for entry in found.files}
    for step in range(20, 10 * kept + 1, 10):
        manifest: Manifest = replace(found, step=step)
        for name, data in {**content, attempt.manifest: manifest.encode()}.items():
            path = run.path(layout.step_folder(step), name)
            backend.put_object("runs", f"{prefix}/{path}", data)
    return attempt


def cost(uri: str, kept: int) -> list[Counter[str]]:
    """The requests of the fourth save of an attempt, and of the fifth."""
    saver = AsyncSaver(filled(uri, kept), keep=KEEP, since=10 * kept)
    told = []
    for number in range(1, 6):
        with requests() as counted:
            saver.save(10 * kept + number, state(number), Facts(metrics={"eval/loss": 2.0}))
            saver.wait()
        assert saver.failure is None and saver.last is not None and saver.last.warning is None
        assert saver.last.deleted == ((10 * kept + number - 2,) if number > 2 else ())
        told.append(counted)
    saver.close()
    print(kept, [dict(counted) for counted in told])
    return told[3:]


@pytest.mark.scenario
@pytest.mark.parametrize("uri", ["s3"], indirect=True)
@pytest.mark.parametrize("many", [12, pytest.param(5000, marks=pytest.mark.exact)])
def test_a_save_costs_as_many_requests_beside_many_as_beside_few(uri: str, many: int) -> None:
    few = cost(uri.replace("?", "-few?"), 3)
    assert cost(uri, many) == few and few[0] == few[1]


@pytest.mark.parametrize("uri", ["s3"], indirect=True)
@pytest.mark.scenario
def test_reading_all_of_them_at_each_save_is_seen(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without a memory of what is there, a save costs a request for each."""
    real = Catalogue.prune
    monkeypatch.setattr(
        Catalogue,
        "prune",
        lambda self, keep, whole: real(Catalogue(self.attempt, self.since), keep, whole=whole),
    )
    few = cost(uri.replace("?", "-few?"), 3)
    assert sum(cost(uri, 10)[0].values()) >= sum(few[0].values()) + 5


@pytest.mark.parametrize("uri", ["s3"], indirect=True)
def test_the_newest_of_many_is_found_without_looking_at_all(uri: str) -> None:
    found = []
    for place, kept in ((uri.replace("?", "-few?"), 3), (uri, 60)):
        run = filled(place, kept).run
        with requests() as counted:
            loaded = load_newest(run, pytest.fail)
        assert loaded is not None and loaded.manifest.step == 10 * kept
        found.append(counted)
    assert found[0] == found[1]


def test_an_attempt_knows_what_the_one_before_has_kept(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The best of all is an old one; the second attempt learns of it once, and keeps it."""
    run = RunFolder.create(open_storage(str(tmp_path)), "run-a")
    keep = Keep(last=1, metric="eval/loss")
    for losses in ([3.0, 1.0, 2.0], [2.5, 0.5, 4.0, 5.0]):
        saver = AsyncSaver(run.claim(), keep=keep)
        begun = max(run.steps(), default=0)
        for number, loss in enumerate(losses, begun + 1):
            saver.save(number, state(number), Facts(metrics={"eval/loss": loss}))
            saver.wait()
        saver.close()
    assert run.steps() == [7, 5]


@pytest.mark.parametrize("uri", ["s3"], indirect=True)
def test_a_run_is_taken_up_without_looking_at_all_that_is_kept(uri: str) -> None:
    """Whether the newest is whole: what has to be known before a copy is looked for in the record."""
    found = []
    for place, kept in ((uri.replace("?", "-few?"), 3), (uri, 60)):
        filled(place, kept)
        with requests() as counted:
            assert next(whole_steps(place, "run-a")) == 10 * kept
        found.append(counted)
    assert found[0] == found[1]
