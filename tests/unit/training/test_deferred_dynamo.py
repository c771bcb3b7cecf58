"""A run that compiles nothing does not import torch's compiler, and one that does has the compiler as torch made it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

TRAIN = """
import json, sys, torch
from lockstep.training.determinism import determinism
def trained():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.func.functional_call(model, dict(model.named_parameters()), torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
with determinism("strict", 1):
    trained()
    imported = [name for name in ("sympy", "torch._inductor", "torch._dynamo.config") if name in sys.modules]
    {then}
"""


def answer(then: str, afterwards: str = "") -> object:
    done = subprocess.run(
        [sys.executable, "-c", f"{TRAIN.replace('{then}', then)}{afterwards}"],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_an_update_imports_no_compiler() -> None:
    assert answer("print(json.dumps(imported))") == []


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "use",
    [
        "import torch._dynamo.config",
        "from torch._dynamo import config",
        "torch._dynamo.reset()",
        "torch._dynamo.eval_frame",
        "torch.compile(lambda x: x, backend='eager')(torch.ones(2))",
    ],
)
def test_what_uses_the_compiler_has_it_whole(use: str) -> None:
    """Also with its mark on what was called before: without it the compiler would trace into an optimizer's own functions."""
    told = answer(
        f"{use}; trained(); real = sys.modules['torch._dynamo']; print(json.dumps([torch._dynamo is real, hasattr(real, '_version'), "
        "type(real).__name__, torch._inductor.config.deterministic, "
        "hasattr(torch.optim.Optimizer.add_param_group.__wrapped__.__dynamo_disable, '_torchdynamo_disable')]))"
    )
    assert told == [True, False, "module", True, True]


@pytest.mark.parametrize("name", ["exc", "config"])
def test_a_module_of_the_compiler_is_there_once(name: str) -> None:
    """Another would have exceptions that nobody raises, and settings that nobody reads."""
    told = answer(
        f"import importlib; module = importlib.import_module('torch._dynamo.{name}'); import torch._inductor.exc, torch._dynamo.exc; "
        f"print(json.dumps([torch._dynamo.__dict__['{name}'] is module is sys.modules['torch._dynamo.{name}'], "
        "issubclass(torch._inductor.exc.InductorError, torch._dynamo.exc.TorchDynamoException), "
        "torch._dynamo.eval_frame.config is torch._dynamo.config, module.__spec__.origin == module.__file__]))"
    )
    assert told == [True] * 4


def test_a_search_through_all_modules_imports_no_compiler() -> None:
    told = answer(
        "import inspect; inspect.getmodule(trained.__code__); [hasattr(m, '__warningregistry__') for m in [*sys.modules.values()]]; "
        "found = sys.modules['torch._dynamo']; print(json.dumps([found.__name__, found.__file__ == found.__spec__.origin, "
        "'torch._dynamo.config' in sys.modules]))"
    )
    assert told == ["torch._dynamo", True, False]


def test_a_compiler_that_is_imported_within_is_deterministic_only_within() -> None:
    """What the compiler reads as it is imported is put back as well: another process may be started afterwards."""
    name = "TORCHINDUCTOR_DETERMINISTIC"
    told = answer(
        "import os, torch._inductor.config as config; within = config.deterministic",
        f"print(json.dumps([within, config.deterministic, os.environ.get({name!r})]))",
    )
    assert told == [True, False, None]


WITHIN = """
    from lockstep.training.deferred_dynamo import compiled_functions, current_stance, functions_compiled
    calls = []
    def compiler(graph, _):
        return lambda *inputs: (calls.append(graph), graph.forward(*inputs))[1]
    def twice(x):
        return 2 * x
    names = [compiled_functions()]
    function = torch.compile(twice, backend=compiler)
    names.append(compiled_functions())
    def seen():
        before = len(calls)
        function(torch.ones(2))
        return [len(calls) > before, current_stance()]
    told = [seen()]
    with functions_compiled():
        told.append(seen())
    told.append(seen())
"""

AFTERWARDS = """
told.append(seen())
for kind in ("strict", "fast"):
    with determinism(kind, 1):
        told.append(seen())
print(json.dumps([names, told]))
"""


def test_a_function_that_is_compiled_runs_as_it_is_written_within() -> None:
    """But for those of Lockstep. The compiler is imported within, and there already the next time."""
    names, told = answer(WITHIN, AFTERWARDS)  # type: ignore[misc]
    assert names == [[], ["__main__.twice"]]
    eager, compiled = [False, "force_eager"], [True, "default"]
    assert told == [eager, compiled, eager, compiled, eager, compiled]
