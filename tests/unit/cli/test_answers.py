"""What a command says at its end, in a terminal."""

from __future__ import annotations

import json
import math

from lockstep.cli.answers import folded, json_text

TEXT = """finished: step 55, epoch 5, 1 worker
metrics           train/loss 0.2422  eval/loss 0.1504  eval/accuracy 0.9698
weights_digest    6e608a6582842e718d431557ee25f67958716bbb5dbac34d8ab4b898c5ce51e5
RUN   NAME    STATUS
spec: {seed:  17}
  eval/loss 0.0254     trial 8   pruned    step 108     optimizer.lr=0.00312222  precision=fp16
  trial 3   failed: the loss of step 14 is not finite: nan; lower optimizer.lr or set clip_norm"""


def test_several_things_under_one_name_are_broken_between_two_of_them() -> None:
    """Whatever is one word, a table or YAML is left to the terminal."""
    assert folded(TEXT, 100) == TEXT
    lines = TEXT.split("\n")
    assert folded(TEXT, 70).split("\n") == [
        lines[0],
        "metrics           train/loss 0.2422  eval/loss 0.1504",
        "                  eval/accuracy 0.9698",
        *lines[2:5],
        "  eval/loss 0.0254     trial 8   pruned    step 108",
        "    optimizer.lr=0.00312222  precision=fp16",
        "  trial 3",
        "    failed: the loss of step 14 is not finite: nan; lower optimizer.lr",
        "    or set clip_norm",
    ]
    assert folded(TEXT, 5).split("\n")[1:3] == [
        "metrics           train/loss 0.2422",
        f"{'':18}eval/loss 0.1504",
    ]


def test_json_has_no_number_that_json_does_not_know() -> None:
    """Any parser takes it: null stands for NaN and the infinities, however deep; every other value is as it was."""
    told = {
        "metrics": {"eval/n": math.nan, "eval/i": -math.inf, "eval/x": 1e300},
        "curve": [(3, math.inf)],
        "s": "NaN",
    }

    def refuse(name: str) -> None:
        raise AssertionError(name)

    found = json.loads(json_text(told), parse_constant=refuse)
    assert found == {
        "metrics": {"eval/n": None, "eval/i": None, "eval/x": 1e300},
        "curve": [[3, None]],
        "s": "NaN",
    }
