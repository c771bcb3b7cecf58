"""A large group's connections fit the limit of open files, which is raised, or what is missing is told before anything connects."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.communication.group import SPARE_DESCRIPTORS, ensure_descriptors
from lockstep.errors import ClusterError
from tests.forked import script


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_as_far_as_needed(limits: tuple[int, int]) -> None:
    opened = len(list(Path("/proc/self/fd").iterdir()))
    low = opened + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, limits[1]))
    ensure_descriptors(300, groups=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 <= soft - (opened + 2 * 303 + SPARE_DESCRIPTORS) <= 2
    assert hard == limits[1]
    ensure_descriptors(4, groups=1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft


def test_a_hard_limit_that_is_too_low_is_told(limits: tuple[int, int]) -> None:
    ranks = 10**9
    if limits[1] == resource.RLIM_INFINITY:
        pytest.skip("there is no hard limit")
    with pytest.raises(
        ClusterError, match=rf"may open {limits[1]} files here, and one of {ranks} workers needs 1000000"
    ):
        ensure_descriptors(ranks, groups=1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


ON_RAY = """
import resource
from lockstep.attempts.process_group import allow_descriptors
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
allow_descriptors(WORKERS)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("workers", "least"), [(300, 2 * 303 + SPARE_DESCRIPTORS), (10**9, 256)])
def test_a_worker_on_ray_has_its_limit_before_ray_forms_a_group(workers: int, least: int) -> None:
    """It is raised before the workers meet. Too low a hard limit ends no process there: the worker tells it as it joins."""
    process = script(ON_RAY.replace("WORKERS", str(workers)))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert least <= int(out) < least + 200
