"""How a global batch that changes, and micro-batches bounded by tokens, are written; and what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import SpecError
from lockstep.plan import BatchSize
from lockstep.spec.loading import load_spec

JOB = {"job": {"use": "tests.unit.job.shown_jobs:Any"}}


def loaded(**sections: Any) -> Any:
    return load_spec({**JOB, **sections})


def test_a_ramp_is_the_sizes_that_megatron_computes() -> None:
    """`--rampup-batch-size 32 32 1000 --global-batch-size 128`: 32 + 32 · int(consumed / (1000 / 3)), until 128."""
    sizes = loaded(batch={"global": {"start": 32, "increment": 32, "samples": 1000, "size": 128}}).batch.sizes

    def here(consumed: int) -> int:
        return next(s.size for s in sizes if s.until_samples is None or consumed < s.until_samples)

    def megatron(consumed: int) -> int:
        return 128 if consumed > 1000 else 32 + 32 * int(consumed / (1000 / 3))

    assert [here(n) for n in range(1500)] == [megatron(n) for n in range(1500)]


def test_the_identity_knows_sizes_however_they_are_written() -> None:
    ramp = loaded(batch={"global": {"start": 8, "increment": 8, "samples": 100, "size": 16}})
    listed = loaded(batch={"global": [{"size": 8, "until_samples": 100}, {"size": 16}]})
    assert ramp.batch == listed.batch
    assert load_spec(ramp.document()).batch == ramp.batch
    assert loaded(batch={"global": [{"size": 8}]}).batch == loaded(batch={"global": 8}).batch


def test_the_micro_batch_divides_every_size() -> None:
    spec = loaded(batch={"global": [{"size": 64, "until_steps": 5}, {"size": 96}]})
    assert (spec.batch.micro, spec.batch.micro_batches) == (4, 24), "an eighth of what divides them"
    assert spec.batch.sizes == (BatchSize(64, until_steps=5), BatchSize(96))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"batch": {"global": []}}, "batch.global: got [], wanted at least one size"),
        (
            {"batch": {"global": [{"size": 8}, {"size": 16}]}},
            "size 1 of 2 has neither",
        ),
        ({"batch": {"global": [{"size": 8, "until_steps": 4}]}}, "size 1 of 1 has one"),
        (
            {"batch": {"global": [{"size": 8, "until_steps": 4, "until_samples": 4}, {"size": 16}]}},
            "batch.global.0: got {'size': 8, 'until_steps': 4, 'until_samples': 4}, wanted one of until_steps and until_samples",
        ),
        (
            {"batch": {"global": [{"size": 8, "until_steps": 4}, {"size": 12, "until_steps": 4}, {"size": 16}]}},
            "wanted until_steps that rise: they count from the beginning of the run",
        ),
        (
            {"batch": {"global": [{"size": 8, "until_step": 4}, {"size": 16}]}},
            "batch.global.0.until_step: unknown key; did you mean 'until_steps'?",
        ),
        (
            {"batch": {"global": [{"size": 8, "until_steps": 4}, {"size": 12}], "micro": 8}},
            "batch.micro: got 8, wanted a divisor of batch.global = 12 and of its other sizes; the nearest is 4",
        ),
        (
            {"batch": {"global": {"start": 8, "increment": 3, "samples": 10, "size": 16}}},
            "wanted a size above start = 8 by a multiple of increment = 3",
        ),
        (
            {"batch": {"global": {"start": 1, "increment": 1, "samples": 20_000, "size": 10_001}}},
            "wanted an increment that makes at most 10000 sizes, not 10001",
        ),
        (
            {"batch": {"global": [{"size": 8, "until_steps": 4}, {"size": 16}], "micro": 8}, "workers": {"min": 3}},
            "workers.min: got 3, wanted at most the 2 micro-batches of a step",
        ),
        (
            {"batch": {"tokens": 100}},
            "batch.tokens: got 100 with data.shuffle=full, where a micro-batch has samples of any length; set data.shuffle=by_length",
        ),
        (
            {
                "batch": {"tokens": 100, "global": [{"size": 8, "until_samples": 4}, {"size": 16}]},
                "data": {"shuffle": "by_length"},
            },
            "batch.global: got until_samples with batch.tokens, where lengths decide how many samples a step has; use until_steps",
        ),
        (
            {"batch": {"tokens": 100}, "data": {"shuffle": "by_length"}, "compile": True},
            "batch.tokens: got 100 with compile=true",
        ),
        (
            {"batch": {"micro": 8}, "data": {"shuffle": "by_length", "group": {"size": 4}}},
            "data.group: got a group with data.shuffle=by_length",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_line(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        loaded(**sections)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
