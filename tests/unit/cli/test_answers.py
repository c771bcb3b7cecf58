"""What a command says at its end, in a terminal."""

from __future__ import annotations

from lockstep.cli.answers import folded

TEXT = """finished: step 55, epoch 5, 1 worker
metrics           train/loss 0.2422  eval/loss 0.1504  eval/accuracy 0.9698
weights_digest    6e608a6582842e718d431557ee25f67958716bbb5dbac34d8ab4b898c5ce51e5
RUN   NAME    STATUS
spec: {seed:  17}"""


def test_several_things_under_one_name_are_broken_between_two_of_them() -> None:
    """Whatever is one word, a table or YAML is left to the terminal."""
    assert folded(TEXT, 80) == TEXT
    lines = TEXT.split("\n")
    lines[1:2] = [
        "metrics           train/loss 0.2422",
        f"{'':18}eval/loss 0.1504",
        f"{'':18}eval/accuracy 0.9698",
    ]
    assert folded(TEXT, 45).split("\n") == lines
    assert folded(TEXT, 5).split("\n") == lines
