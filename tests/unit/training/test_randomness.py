"""Draws are keyed by what they are for: the same key gives the same draws, whatever was drawn before."""

from __future__ import annotations

import contextvars
import random
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.randomness import digest64, rng, seed_all


def draws() -> tuple[float, ...]:
    return (
        random.random(),
        float(np.random.rand()),
        float(torch.rand(())),
        float(rng().random()),
        random.gauss(0, 1),
    )


KEYS: list[tuple[int | str, ...]] = [
    (3, "step", 0, 0), (3, "step", 0, 1), (3, "step", 1, 0), (4, "step", 0, 0), (3, "data", 0, 0), (3, "eval", 0),
    (3, "model"), (3, "step", 10, 0), (3, "step", 1, 1), (2**62, "step", 0, 0),
]  # fmt: skip


def test_the_same_key_gives_the_same_draws() -> None:
    for key in KEYS:
        seed_all(*key)
        first = draws()
        random.random(), np.random.normal(), torch.randn(7), random.gauss(0, 1)
        seed_all(*key)
        assert draws() == first


def test_every_generator_draws_otherwise_for_another_key() -> None:
    every = []
    for key in KEYS:
        seed_all(*key)
        every.append(draws())
    for a, b in combinations(every, 2):
        assert all(x != y for x, y in zip(a, b, strict=True))


def test_a_kept_half_of_a_pair_is_forgotten() -> None:
    """python's and numpy's normal deviates come in pairs; the second must not outlive the seed."""
    seed_all(1, "step", 0, 0)
    first = random.gauss(0, 1), np.random.normal(), float(torch.randn(()))
    seed_all(1, "step", 0, 0)
    assert (random.gauss(0, 1), np.random.normal(), float(torch.randn(()))) == first


def test_keys_do_not_run_into_each_other() -> None:
    assert digest64((1, 23)) != digest64((12, 3))
    assert digest64(("a", "b")) != digest64(("ab",))


@given(
    st.lists(
        st.tuples(st.integers(0, 2**63), st.integers(0, 10**9), st.integers(0, 4096)), min_size=2, unique=True
    )
)
def test_no_two_steps_share_their_seed(steps: list[tuple[int, int, int]]) -> None:
    assert len({digest64((seed, "step", t, m)) for seed, t, m in steps}) == len(steps)


DIGEST = 511929565744010100
"""BLAKE2b, 8 bytes, of `17 step 3 1` with unit separators between the words, read as a little-endian number."""


def test_digests_are_what_they_were() -> None:
    """They are part of every recorded run: another formula would be another run."""
    assert digest64((17, "step", 3, 1)) == DIGEST
    code = "from lockstep.randomness import digest64; print(digest64((17, 'step', 3, 1)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "1"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert int(done.stdout) == DIGEST


def test_rng_is_keyed_and_parted_by_stream() -> None:
    seed_all(3, "step", 0, 0)
    assert rng("mixup").random() == rng("mixup").random()
    assert lockstep.rng("mixup").random() != rng("cutout").random()
    first = rng().random()
    random.random(), torch.rand(3)
    assert rng().random() == first
    seed_all(3, "step", 0, 1)
    assert rng().random() != first


def test_rng_leaves_the_default_generators_alone() -> None:
    seed_all(3, "step", 0, 0)
    wanted = random.random(), np.random.rand(), float(torch.rand(()))
    seed_all(3, "step", 0, 0)
    rng().random(100)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == wanted


def test_rng_outside_a_micro_batch_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"call it in loss, metrics or a dataset"):
        contextvars.Context().run(rng)
