"""Functions that something has replaced in a process: the library's own and Ray's print are none, any other one is told."""

from __future__ import annotations

import builtins
import math

import pytest
import ray.train

from lockstep.job.inputs.replaced_functions import process_facts


def test_the_print_of_a_worker_of_ray_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in one process has Python's own, and is the same run. (Any function of Ray's stands for its print here.)"""
    before = process_facts()
    monkeypatch.setattr(builtins, "print", ray.train.get_context)
    assert process_facts() == before


def test_another_function_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_facts()
    monkeypatch.setattr(math, "exp", math.expm1)
    assert process_facts() == {**before, "replaced math.exp": "math.expm1"}
