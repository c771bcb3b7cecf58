from __future__ import annotations

import json
import platform

import pytest

from lockstep.record.environment import environment
from tests.forked import script


def test_the_environment_is_flat_facts_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("MKL_CBWR", "AUTO")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    facts = environment(torch.device("cpu"))
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["device_kind"] == "cpu"
    assert facts["threads"] == torch.get_num_threads()
    assert facts["deterministic_algorithms"] is False
    assert facts["MKL_CBWR"] == "AUTO"
    assert "CUBLAS_WORKSPACE_CONFIG" not in facts
    assert all(isinstance(value, str | int | bool) for value in facts.values())
    assert json.loads(json.dumps(facts)) == facts


PRECISIONS = """
import torch
from lockstep.record.environment import environment
SETTING
facts = environment(torch.device("cpu"))
print(facts["cudnn_tf32"], facts["matmul_tf32"])
"""


@pytest.mark.parametrize(
    ("setting", "facts"),
    [
        ("pass", "True False"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "True True"),
        ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", "False False"),
        ("torch.backends.fp32_precision = 'ieee'", "False False"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "True True"),
        ("torch.backends.cudnn.allow_tf32 = False", "False False"),
        ("torch.set_float32_matmul_precision('high')", "True True"),
    ],
)
def test_tf32_is_told_however_the_job_has_set_it(setting: str, facts: str) -> None:
    """torch has two switches, and reading the old one raises where the new one was used."""
    process = script(PRECISIONS.replace("SETTING", setting))
    out, err = process.communicate(timeout=120)
    assert out == f"{facts}\n", err
