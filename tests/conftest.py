"""What holds for every test: the environment of an exact run, and which tests wait to be asked for."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from tests.scheduling import Together

# Before the first matrix product of this process, and for the processes that tests start.
os.environ.setdefault("MKL_CBWR", "AUTO")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Tests have more threads than a small machine has cores: one that waits for others shall not spin meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Ray's workers are as urgent as the tests beside them: with Ray's own 15, a busy machine would starve them.
os.environ.setdefault("RAY_worker_niceness", "0")
# Tests start hundreds of processes, each of which would compile the same files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts the tests in the background has them ignore SIGINT, and so the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A crowded machine is no counterexample.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

WARNINGS_OF_OTHERS = (
    # From python 3.12 on: loader processes are forked on purpose, and run nothing of torch's threads.
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning",
    # Tests start more loader processes than a small machine has cores.
    "ignore:This DataLoader will create .* worker processes in total:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    if sys.flags.hash_randomization and os.environ.get("PYTHONHASHSEED", "random") in {"random", "0"}:
        raise pytest.UsageError(
            "exact runs need fixed string hashing: PYTHONHASHSEED=0 pytest … (make test does so)"
        )
    for line in WARNINGS_OF_OTHERS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session", autouse=True)
def _figures_left_out() -> Iterator[None]:
    """Of runs in the tests' own process; `drawn_figures` has them drawn."""
    from tests.without_figures import without_figures

    with without_figures():
        yield


@pytest.fixture
def drawn_figures() -> Iterator[None]:
    """For tests of what a run leaves, figures among it."""
    from tests.without_figures import with_figures

    with with_figures():
        yield


@pytest.hookimpl(optionalhook=True)  # several processes or one
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together:
    return Together(config, log)


@pytest.hookimpl(tryfirst=True)  # pytest looks at marks in this hook too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave scenarios and full products to `-m scenario` and `-m exact`; the default run has a covering part of each.

    Of the cases of a test with the mark `every(n)`, each n-th belongs to the default run and the others are scenarios; of those, with the mark
    `thinned(n)`, each n-th stays one and the others are exact.
    """
    _move(items, "every", to=pytest.mark.scenario)
    _move([item for item in items if item.get_closest_marker("scenario")], "thinned", to=pytest.mark.exact)
    if config.option.markexpr:
        return
    left = [item for item in items if {"scenario", "exact"} & {mark.name for mark in item.iter_markers()}]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def _move(items: list[pytest.Item], mark_name: str, to: pytest.MarkDecorator) -> None:
    """Give a mark to the cases of each test with `mark_name`(n) but each n-th."""
    cases: Counter[tuple[pytest.Item | pytest.Collector | None, str]] = Counter()
    for item in items:
        if mark := item.get_closest_marker(mark_name):
            test = item.parent, getattr(item, "originalname", item.name)
            if cases[test] % mark.args[0]:
                item.add_marker(to)
            cases[test] += 1
