"""Draws are keyed by what they are for: the same key gives the same draws, whatever was drawn before."""

from __future__ import annotations

import contextvars
import random
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep import randomness
from lockstep.randomness import Key, digest64, rng, seed_all, step_key


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
        seed_all(Key(key))
        first = draws()
        random.random(), np.random.normal(), torch.randn(7), random.gauss(0, 1)
        seed_all(Key(key))
        assert draws() == first


def test_every_generator_draws_otherwise_for_another_key() -> None:
    every = []
    for key in KEYS:
        seed_all(Key(key))
        every.append(draws())
    for a, b in combinations(every, 2):
        assert all(x != y for x, y in zip(a, b, strict=True))


def test_a_kept_half_of_a_pair_is_forgotten() -> None:
    """python's and numpy's normal deviates come in pairs; the second must not outlive the seed."""
    seed_all(step_key(1, 0, 0))
    first = random.gauss(0, 1), np.random.normal(), float(torch.randn(()))
    seed_all(step_key(1, 0, 0))
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


@pytest.mark.scenario
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


def test_keys_are_what_they_were() -> None:
    """Each of them, for the same reason."""
    phase = ("critic",)
    assert [
        randomness.model_key(5), randomness.datasets_key(5), randomness.fetch_key(5, "eval data", 2, 3),
        randomness.step_key(5, 2, 3), randomness.step_key(5, 2, 3, phase), randomness.update_key(5, 2, phase),
        randomness.after_step_key(5, 2), randomness.frozen_key(5, 2), randomness.evaluation_key(5, 3),
        randomness.whole_set_key(5), randomness.rehearsal_key(5), randomness.rehearsal_key(5, "again", 1),
        randomness.whole_batch_key(5, 2, phase), randomness.evaluation_batch_key(5, 3),
        randomness.recheck_key(5, 2, "micro-batch"), randomness.epoch_order_key(5, 1),
        randomness.sample_key(5, "fingerprint", 7), randomness.sample_key(5, "leakage"),
        randomness.code_key("job", "m:Job"), randomness.final_model_key(),
    ] == [
        (5, "model"), (5, "train data"), (5, "eval data", 2, 3),
        (5, "step", 2, 3), (5, "step", 2, 3, "critic"), (5, "update", 2, "critic"),
        (5, "after step", 2), (5, "frozen", 2), (5, "eval", 3),
        (5, "eval set"), (5, "rehearsal"), (5, "rehearsal", "again", 1),
        (5, "batch loss", 2, "critic"), (5, "eval batch", 3),
        (5, "recheck", 2, "micro-batch"), (5, "epoch order", 1),
        (5, "fingerprint", 7), (5, "leakage"), ("job", "m:Job"), ("final model",),
    ]  # fmt: skip


def test_the_record_says_the_keys_that_are_used() -> None:
    assert randomness.seeds(17, phases=True, frozen=True) == {
        "model": str(digest64((17, "model"))),
        "train_data and eval_data, each opened": str(digest64((17, "train data"))),
        "micro-batch m of step t, computed": "digest64((17, 'step', t, m, phase))",
        "micro-batch m of step t, fetched": "digest64((17, 'data', t, m))",
        "the loss of the whole batch of step t": "digest64((17, 'batch loss', t, phase))",
        "update t of an optimizer with code of the job's own": "digest64((17, 'update', t, phase))",
        "after_step of step t": "digest64((17, 'after step', t))",
        "frozen_parameters of step t": "digest64((17, 'frozen', t))",
        "order of epoch e": "torch.Generator seeded with 17 + e",
        "generators": "torch: those 64 bits; numpy: their lower 32; python: all of them",
    }
    assert randomness.seeds(17)["micro-batch m of step t, computed"] == "digest64((17, 'step', t, m))"


def test_a_key_is_made_in_one_module_alone() -> None:
    """A draw that is made again elsewhere (a check, a rehearsal) has the key of the first one: by the same function."""
    package = Path(lockstep.__file__).parent
    made = {
        str(module.relative_to(package))
        for module in package.rglob("*.py")
        if re.search(r"\bKey\(|seed_all\((?!\w+_key\(|key: Key)", module.read_text())
    }
    assert made == {"randomness.py"}


def test_rng_is_keyed_and_parted_by_stream() -> None:
    seed_all(step_key(3, 0, 0))
    assert rng("mixup").random() == rng("mixup").random()
    assert lockstep.rng("mixup").random() != rng("cutout").random()
    first = rng().random()
    random.random(), torch.rand(3)
    assert rng().random() == first
    seed_all(step_key(3, 0, 1))
    assert rng().random() != first


def test_rng_leaves_the_default_generators_alone() -> None:
    seed_all(step_key(3, 0, 0))
    wanted = random.random(), np.random.rand(), float(torch.rand(()))
    seed_all(step_key(3, 0, 0))
    rng().random(100)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == wanted


def test_rng_outside_a_micro_batch_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"call it in loss, metrics or a dataset"):
        contextvars.Context().run(rng)
