"""Workers forked from one process that has imported what they need: with their own arguments, environment, folder and files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.attempts.preloaded_modules import AHEAD
from lockstep.clusters.ray_internals import fork_server, rays_set_up
from lockstep.clusters.ray_internals.fork_server import (
    CREDENTIAL_VARIABLE,
    OUTLIVES_SIGTERM,
    PRELOAD,
    preloading,
)
from lockstep.clusters.warm_server import server_ahead

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="processes are handed over by abstract sockets"
)

WORKER = """
import gc, json, os, sys
there = "colorsys" in sys.modules
told = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "words": sys.argv[1:], "there": there,
        "folder": os.getcwd(), "said": os.environ.get("LOCKSTEP_SAID"), "name": __name__, "path": sys.path[0], "frozen": gc.get_freeze_count() > 0}
if "ray" in sys.modules:
    told["id"] = sys.modules["ray"].ObjectRef.from_random().hex()
if sys.argv[-1] == "hears":
    import signal, subprocess, time
    from ray._private import utils
    utils.set_sigterm_handler(lambda number, frame: told.update(heard=True))  # as Ray's worker does it
    os.kill(os.getpid(), signal.SIGTERM)
    if "heard" not in told:
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        if not (forked := os.fork()):
            time.sleep(60)
        os.kill(forked, signal.SIGTERM)
        told["ended"] = [program.wait(), -os.WTERMSIG(os.waitpid(forked, 0)[1])]
print(json.dumps(told), flush=True)
if sys.argv[-1] == "fails":
    raise ValueError("no luck")
if sys.argv[-1] == "waits":
    import time; time.sleep(60)
"""


PLAIN = {"PYTHONPATH": str(ROOT / "platform"), "PATH": os.environ["PATH"]}
"""The environment of a worker, as `Started` has it."""


class Started:
    """One worker, as a raylet starts it: here this process is the raylet."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        folder.mkdir()
        self.folder = folder
        Path(folder.parent, "worker.py").write_text(WORKER)
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", fork_server.__file__, str(folder.parent / "worker.py"), *words],
                cwd=folder,
                env={**PLAIN, **environment},
                stdout=out,
                stderr=err,
            )

    def told(self) -> dict[str, Any]:
        until = time.monotonic() + 60
        while not (text := (self.folder / "out").read_text()):
            assert time.monotonic() < until, (self.folder / "err").read_text()
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(text)
        return found


Start = Callable[..., dict[str, Any]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker in a folder of its own, and gives what it tells."""
    started: list[Started] = []

    def begin(*words: str, **environment: str) -> dict[str, Any]:
        started.append(Started(tmp_path / str(len(started)), *words, **environment))
        return started[-1].told()

    yield begin
    for one in started:
        one.process.kill()  # the server, where it has become it
        one.process.wait()


def test_a_worker_is_forked_with_what_is_its_own(start: Start, tmp_path: Path) -> None:
    first = start("one", **{PRELOAD: "colorsys", "LOCKSTEP_SAID": "a"})
    second = start("two", "2", **{PRELOAD: "colorsys", "LOCKSTEP_SAID": "b"})
    assert first["parent"] == second["parent"] != os.getpid()
    assert (first["there"], second["there"]) == (True, True)
    assert (first["words"], second["words"]) == (["one"], ["two", "2"])
    assert (first["said"], second["said"]) == ("a", "b")
    assert (first["folder"], second["folder"]) == (str(tmp_path / "0"), str(tmp_path / "1"))
    for told in (first, second):
        assert told["frozen"]  # a collection copies no page of what was imported
        assert told["group"] == told["pid"]  # Ray ends a worker by its process group
        assert (told["name"], told["path"]) == ("__main__", str(tmp_path))


def test_workers_of_another_environment_have_another_server(start: Start) -> None:
    """What a module reads as it is imported, numbers of threads for one, is that of the worker."""
    first = start(**{PRELOAD: "colorsys", "OMP_NUM_THREADS": "1"})
    second = start(**{PRELOAD: "colorsys", "OMP_NUM_THREADS": "2"})
    assert first["parent"] != second["parent"]


def test_a_worker_that_needs_no_modules_does_not_wait_for_them(start: Start) -> None:
    plain = start()
    assert (plain["parent"], plain["there"], plain["frozen"]) == (os.getpid(), False, False)
    server = start(**{PRELOAD: "colorsys"})
    forked = start()
    assert (forked["parent"], forked["there"]) == (server["parent"], True)


def test_the_next_job_of_a_cluster_has_a_server_of_its_own(start: Start) -> None:
    first = start(**{PRELOAD: "colorsys", "RAY_JOB_ID": "01000000"})
    assert start(**{PRELOAD: "colorsys", "RAY_JOB_ID": "01000000"})["parent"] == first["parent"]
    assert start(**{PRELOAD: "colorsys", "RAY_JOB_ID": "02000000"})["parent"] != first["parent"]


@pytest.mark.scenario
def test_forked_workers_draw_ids_of_their_own(start: Start) -> None:
    """Ray's generator is copied by a fork once it was used, as it is by each class of actors that is imported."""
    first, second = (start(**preloading(AHEAD)) for _ in range(2))
    assert first["parent"] == second["parent"] != os.getpid()
    assert first["id"] != second["id"]


@pytest.fixture
def deaf() -> Iterator[None]:
    """What is started is deaf to SIGTERM, as a raylet of an own cluster is."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("preload", [{}, {PRELOAD: "colorsys"}])
def test_a_worker_of_an_own_cluster_outlives_sigterm_and_what_it_starts_does_not(
    start: Start, deaf: None, preload: dict[str, str]
) -> None:
    """Programs and pools of a job are ended by this signal: one that they did not hear would be waited for without end."""
    told = start("hears", **preload, **{OUTLIVES_SIGTERM: "1"})
    assert (told.get("heard"), told["ended"]) == (None, [-signal.SIGTERM, -signal.SIGTERM])
    assert (told["parent"] == os.getpid()) == (not preload)
    assert (told["words"], told["name"]) == (["hears"], "__main__")


def test_a_worker_of_another_cluster_hears_sigterm(start: Start) -> None:
    told = start("hears", **{PRELOAD: "colorsys", "LOCKSTEP_SAID": "a"})
    assert told["heard"]


def test_no_worker_is_forked_that_would_draw_the_ids_of_another(start: Start, tmp_path: Path) -> None:
    """What is imported has used the generator, as with a Ray that draws at another place."""
    (tmp_path / "draws.py").write_text("import ray; ray.ObjectRef.from_random()")
    paths = {"PYTHONPATH": os.pathsep.join([PLAIN["PYTHONPATH"], str(tmp_path)])}
    before = children()
    with server_ahead({**PLAIN, **paths}, ["this"]):
        (ahead,) = children() - before
        more = {**paths, PRELOAD: "draws", CREDENTIAL_VARIABLE: os.environ[CREDENTIAL_VARIABLE]}
        told = start(**more)
        assert (told["parent"], told["there"]) == (os.getpid(), False)
        assert not psutil.Process(ahead).children()


def test_a_lost_server_is_replaced(start: Start) -> None:
    first = start(**{PRELOAD: "colorsys"})
    os.kill(first["parent"], signal.SIGKILL)
    second = start(**{PRELOAD: "colorsys"})
    assert second["parent"] != first["parent"]
    assert second["there"]


def test_a_server_that_is_lost_while_it_is_asked_is_replaced(tmp_path: Path) -> None:
    more = {"LC_ALL": "C.UTF-8"}  # or python adds to the environment
    name = fork_server._address({**PLAIN, **more, PRELOAD: "colorsys"}, os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lost:
        lost.bind(name)
        lost.listen()
        lost.settimeout(60)
        worker = Started(tmp_path / "first", **{**more, PRELOAD: "colorsys"})
        try:
            asked, _ = lost.accept()
            fork_server.received(asked)
            lost.close()
            asked.close()
            assert worker.told()["there"]
        finally:
            worker.process.kill()
            worker.process.wait()


@pytest.mark.scenario
def test_a_worker_whose_server_hangs_starts_by_itself(tmp_path: Path) -> None:
    """And is not forked once more when the server runs on."""
    first = Started(tmp_path / "first", **{PRELOAD: "colorsys"})
    server = psutil.Process(first.told()["parent"])
    server.suspend()
    began = time.monotonic()
    second = Started(tmp_path / "second", "alone", **{PRELOAD: "colorsys"})
    told = second.told()
    try:
        assert time.monotonic() - began < fork_server._FORK_S + 30
        assert (told["parent"], told["there"], told["words"]) == (os.getpid(), False, ["alone"])
        server.resume()
        third = Started(tmp_path / "third", **{PRELOAD: "colorsys"})
        assert third.told()["parent"] == server.pid
        assert len((tmp_path / "second" / "out").read_text().splitlines()) == 1
    finally:
        for one in (first, second, third):
            one.process.kill()
            one.process.wait()


def test_several_at_once_have_one_server(tmp_path: Path) -> None:
    started = [Started(tmp_path / str(n), str(n), **{PRELOAD: "colorsys,no_such_module"}) for n in range(6)]
    told = [one.told() for one in started]
    try:
        assert len({one["parent"] for one in told}) == 1
        assert [one["words"] for one in told] == [[str(n)] for n in range(6)]
    finally:
        for one in started:
            one.process.kill()
            one.process.wait()


def test_a_worker_that_fails_tells_why_in_its_own_file(start: Start, tmp_path: Path) -> None:
    start(**{PRELOAD: "colorsys"})
    failed = start("fails", **{PRELOAD: "colorsys"})
    until = time.monotonic() + 30
    while "ValueError: no luck" not in (tmp_path / "1" / "err").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    while psutil.pid_exists(failed["pid"]):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.every(2)
@pytest.mark.parametrize("then", ["print(first.told()['parent'])", "importing(first)"])
def test_the_server_ends_with_its_raylet(tmp_path: Path, then: str) -> None:
    """One that is lost while the server imports, too."""
    text = (
        "import sys; from pathlib import Path; from tests.unit.clusters.test_fork_server import *; "
        f"first = Started(Path(sys.argv[1], 'one'), **{{PRELOAD: 'colorsys,slow', 'PYTHONPATH': sys.argv[2]}}); {then}"
    )
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time; pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid())); time.sleep(0.5)"
    )
    paths = os.pathsep.join([str(ROOT / "platform"), str(ROOT)])
    raylet = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path), os.pathsep.join([paths, str(tmp_path)])],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    until = time.monotonic() + 30
    while psutil.pid_exists(int(raylet.stdout)):
        assert time.monotonic() < until
        time.sleep(0.05)


def importing(started: Started) -> None:
    """Print the server's process id while it imports."""
    path = started.folder.parent / "pid"
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    print(path.read_text(), flush=True)
    os._exit(0)


@pytest.mark.scenario
def test_the_server_ends_when_nobody_needs_it_any_more(start: Start, tmp_path: Path) -> None:
    """As long as a worker of it lives it is needed."""
    (tmp_path / "short.py").write_text(
        "from lockstep.clusters.ray_internals import fork_server; fork_server.IDLE_S = 0.3"
    )
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(tmp_path)]), PRELOAD: "short"}
    first = start("waits", **paths)
    server = psutil.Process(first["parent"])
    time.sleep(2.0)
    assert server.is_running() and server.status() != psutil.STATUS_ZOMBIE
    os.kill(first["pid"], signal.SIGKILL)
    until = time.monotonic() + 30
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert start(**paths)["parent"] != server.pid


# --- in place of Ray's set-up of a worker ------------------------------------------------------------------------


def raylets_words(**context: Any) -> list[str]:
    """What a raylet adds to the words of a worker."""
    plain = {"env_vars": {}, "command_prefix": [], "py_executable": sys.executable}
    rare = {"override_worker_entrypoint": None, "java_jars": []}
    given = json.dumps(plain | rare | context)
    return [f"--serialized-runtime-env-context={given}", "--language=PYTHON", "--worker-id=1"]


def set_up(folder: Path, **context: Any) -> dict[str, Any]:
    """What a worker tells that a raylet sets up by this file."""
    folder.mkdir(exist_ok=True)
    script = folder / "worker.py"
    script.write_text(WORKER)
    words = [sys.executable, fork_server.__file__, str(script), "one", *raylets_words(**context)]
    done = subprocess.run(words, cwd=folder, env=PLAIN, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("prefix", [[], ["cd", "'a folder'", "&&"]])
def test_a_worker_is_set_up_as_ray_would(tmp_path: Path, prefix: list[str]) -> None:
    """Its working directory, variables and words are those that Ray's own set-up gives it."""
    (tmp_path / "a folder").mkdir()
    context = {
        "env_vars": {"LOCKSTEP_SAID": "a b'c"},
        "command_prefix": prefix,
        "py_executable": sys.executable,
    }
    told = set_up(tmp_path, **context)
    rays = [sys.executable, rays_set_up()]
    words = [*rays, str(tmp_path / "worker.py"), "one", *raylets_words(**context)]
    done = subprocess.run(words, cwd=tmp_path, env=PLAIN, capture_output=True, text=True, check=True)
    same = ("words", "folder", "said", "name", "path", "there")
    assert {name: told[name] for name in same} == {name: json.loads(done.stdout)[name] for name in same}
    assert told["words"] == ["one", "--worker-id=1"]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "context",
    [
        {"command_prefix": ["echo", "1", ">", "made", "&&"]},
        {"env_vars": {"LOCKSTEP_SAID": "${PATH}"}},
        {"override_worker_entrypoint": "other.py"},
    ],
)
def test_what_only_ray_knows_how_to_set_up_is_left_to_it(tmp_path: Path, context: dict[str, Any]) -> None:
    (tmp_path / "other.py").write_text(WORKER)
    told = set_up(tmp_path, **context)
    assert told["words"] == ["one", "--worker-id=1"]
    assert (tmp_path / "made").exists() == ("command_prefix" in context)
    assert told["said"] == (PLAIN["PATH"] if "env_vars" in context else None)


def test_a_worker_is_set_up_and_forked(start: Start, tmp_path: Path) -> None:
    server = start(**{PRELOAD: "colorsys"})
    script = tmp_path / "worker.py"
    context = {"env_vars": {"LOCKSTEP_SAID": "a"}, "py_executable": fork_server.py_executable()}
    with (tmp_path / "out").open("w") as out:
        words = [sys.executable, fork_server.__file__, str(script), "one", *raylets_words(**context)]
        subprocess.run(words, cwd=tmp_path, env=PLAIN, stdout=out, check=True)
    until = time.monotonic() + 60
    while not (text := (tmp_path / "out").read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    told = json.loads(text)
    assert (told["parent"], told["said"], told["words"]) == (server["parent"], "a", ["one", "--worker-id=1"])


# --- ahead of the cluster -------------------------------------------------------------------------------------


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def from_ahead(told: dict[str, Any], ahead: int) -> bool:
    """Whether a worker's server is forked from the process ahead."""
    return psutil.Process(told["parent"]).ppid() == ahead


@pytest.mark.scenario
def test_what_is_imported_ahead_forks_the_server_of_each_job(start: Start, tmp_path: Path) -> None:
    """What a module prints is in no worker's file."""
    before = children()
    with server_ahead(PLAIN, ["this"]):
        (ahead,) = children() - before
        more = {
            PRELOAD: "colorsys",
            CREDENTIAL_VARIABLE: os.environ[CREDENTIAL_VARIABLE],
            "RAY_JOB_ID": "01000000",
        }
        first = start("one", LOCKSTEP_SAID="a", **more)
        second = start("two", LOCKSTEP_SAID="b", **more)
        assert first["parent"] == second["parent"]
        for told, words, said in ((first, ["one"], "a"), (second, ["two"], "b")):
            assert from_ahead(told, ahead)
            assert (told["there"], told["words"], told["said"]) == (True, words, said)
            assert (told["name"], told["path"], told["group"]) == ("__main__", str(tmp_path), told["pid"])
        assert (first["folder"], second["folder"]) == (str(tmp_path / "0"), str(tmp_path / "1"))
        other = start(**{**more, "RAY_JOB_ID": "02000000"})
        assert (other["parent"] != first["parent"], from_ahead(other, ahead)) == (True, True)
    assert CREDENTIAL_VARIABLE not in os.environ
    for one in (ahead, first["parent"], other["parent"]):
        until = time.monotonic() + 30
        while psutil.pid_exists(one):
            assert time.monotonic() < until
            time.sleep(0.05)
    assert start(**more)["there"]


def test_what_was_imported_under_another_environment_forks_no_server(start: Start) -> None:
    before = children()
    with server_ahead(PLAIN, ["this"]):
        (ahead,) = children() - before
        more = {PRELOAD: "colorsys", CREDENTIAL_VARIABLE: os.environ[CREDENTIAL_VARIABLE]}
        other = start(OMP_NUM_THREADS="2", **more)
        assert (from_ahead(other, ahead), other["there"]) == (False, True)
        assert from_ahead(start(**more), ahead)


def test_what_a_module_sets_as_it_is_imported_is_no_other_environment(start: Start, tmp_path: Path) -> None:
    """The driver may have imported it too, and so handed the variable on to its cluster. Another value is another environment."""
    (tmp_path / "sets.py").write_text("import os; os.environ.setdefault('SET_BY_A_LIBRARY', 'yes')")
    paths = {**PLAIN, "PYTHONPATH": os.pathsep.join([PLAIN["PYTHONPATH"], str(tmp_path)])}
    before = children()
    with server_ahead(paths, ["sets"]):
        (ahead,) = children() - before
        more = {**paths, PRELOAD: "colorsys", CREDENTIAL_VARIABLE: os.environ[CREDENTIAL_VARIABLE]}
        assert from_ahead(start(**more), ahead)
        assert from_ahead(start(**more, SET_BY_A_LIBRARY="yes"), ahead)
        assert not from_ahead(start(**more, SET_BY_A_LIBRARY="no"), ahead)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_module_that_was_changed_since_is_imported_anew(
    start: Start, tmp_path: Path, replaced: bool
) -> None:
    """Also one that another file takes the place of, which is as old as it and of the same length."""
    written = tmp_path / "written.py"
    written.write_text("import os; os.environ['LOCKSTEP_SAID'] = 'a'")
    old = written.stat()
    paths = {**PLAIN, "PYTHONPATH": os.pathsep.join([PLAIN["PYTHONPATH"], str(tmp_path)])}
    before = children()
    time.sleep(0.05)
    with server_ahead(paths, ["written"]):
        (ahead,) = children() - before
        more = {**paths, PRELOAD: "colorsys", CREDENTIAL_VARIABLE: os.environ[CREDENTIAL_VARIABLE]}
        assert from_ahead(start(**more, RAY_JOB_ID="01000000"), ahead)
        text = "import os, pathlib; pathlib.Path(__file__).with_name('anew').write_text('b')"
        if replaced:
            (tmp_path / "other.py").write_text(text)
            os.utime(tmp_path / "other.py", ns=(old.st_atime_ns, old.st_mtime_ns))
            (tmp_path / "other.py").replace(written)
        else:
            written.write_text(text)
        assert not from_ahead(start(**more, RAY_JOB_ID="02000000"), ahead)
        last = start(**more, RAY_JOB_ID="03000000")
        assert (from_ahead(last, ahead), (tmp_path / "anew").read_text()) == (True, "b")


def test_a_process_ahead_that_is_lost_is_done_without(start: Start) -> None:
    before = children()
    with server_ahead(PLAIN, ["this"]):
        (ahead,) = children() - before
        os.kill(ahead, signal.SIGKILL)
        first = start(**{PRELOAD: "colorsys", CREDENTIAL_VARIABLE: os.environ[CREDENTIAL_VARIABLE]})
        assert (first["parent"] != ahead, first["there"]) == (True, True)


@pytest.mark.scenario
def test_the_process_ahead_ends_with_its_driver(tmp_path: Path) -> None:
    """Which was killed."""
    text = (
        "import os, signal; from tests.unit.clusters.test_fork_server import *\n"
        "with server_ahead(PLAIN, ['this']):\n"
        "    print(*children(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    paths = os.pathsep.join([str(ROOT / "platform"), str(ROOT)])
    driver = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert driver.returncode == -signal.SIGKILL
    until = time.monotonic() + 30
    while psutil.pid_exists(int(driver.stdout)):
        assert time.monotonic() < until
        time.sleep(0.05)
