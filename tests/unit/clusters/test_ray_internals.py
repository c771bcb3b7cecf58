"""Ray's private parts: behind one door, checked before they are used, and nowhere else."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from lockstep.clusters import ray_internals
from lockstep.clusters.packaging import pack
from lockstep.clusters.ray_internals import (
    _CONTROLLER,
    _GROUP,
    ATTRIBUTES,
    NEEDED,
    PUBLIC_ONLY,
    Part,
    _differs,
    _lacks,
    unavailable,
    warnings_of_ray,
)
from lockstep.clusters.run_registry import Notice, RunRegistry

ROOT = Path(__file__).parents[3]
DOOR = Path(ray_internals.__file__).parent

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


@pytest.fixture
def asked_anew() -> Iterator[None]:
    _differs.cache_clear()
    yield
    _differs.cache_clear()


def is_private(name: str) -> bool:
    """Whether a dotted name leads into what Ray does not offer to others."""
    parts = name.split(".")
    internal = ("ray.core.generated", "ray.experimental", "ray.dashboard")
    return parts[0] == "ray" and (
        any(part.startswith("_") for part in parts[1:])
        or any(f"{name}.".startswith(f"{module}.") for module in internal)
    )


def private_names(source: str) -> list[str]:
    """Every private name of Ray's that a module imports, or reaches through `ray` itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return [name for name in found if is_private(name)]


RAYS_WORDS = ("ray_current_cluster", "__RAY_", "--serialized-runtime-env", "setup_worker")
"""Names of files, variables, options and fields by which Ray's own processes speak to each other."""


def private_strings(source: str) -> list[str]:
    """Every string of a module, docstrings left out, that names a private part of Ray's or is one of RAYS_WORDS."""
    tree = ast.parse(source)
    prose = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose
    ]
    return [
        text
        for text in texts
        if any(word in text for word in RAYS_WORDS)
        or any(is_private(name) for name in re.findall(r"(?<![\w.])ray(?:\.\w+)+", text))
    ]


@pytest.mark.scenario
def test_nothing_outside_the_door_uses_rays_private_parts() -> None:
    validators = (
        ROOT / "tests" / "unit" / "clusters" / "schemas.py"
    )  # of Ray's own cluster files, for the tests of ours
    modules = [path for folder in ("platform", "jobs", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 200
    found = {
        str(path.relative_to(ROOT)): names
        for path in modules
        if DOOR not in path.parents
        and path != validators
        and (names := private_names(path.read_text(encoding="utf-8")))
    }
    assert list(found) == []


@pytest.mark.scenario
def test_nothing_outside_the_door_knows_the_words_between_rays_processes() -> None:
    modules = [path for path in (ROOT / "platform").rglob("*.py") if DOOR not in path.parents]
    found = {
        path.name: strings
        for path in modules
        if (strings := private_strings(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        'READ_LATER = ("LOCKSTEP_", "__RAY_WORKER_PROCESS_SETUP_HOOK")',
        'Path(folder, "ray_current_cluster").read_text()',
        'CONTEXT = "--serialized-runtime-env-context="',
        'importlib.import_module("ray._private.services")',
    ],
)
def test_each_word_between_rays_processes_is_seen(source: str) -> None:
    assert private_strings(source)


def test_prose_and_documented_words_are_let_through() -> None:
    source = '"""Like ray._private.services."""\nENV = {"RAY_ADDRESS": "auto", "py_executable": "python"}'
    assert private_strings(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "from ray.train.v2._internal.execution.controller import TrainController",
        "def f():\n    from ray._raylet import GcsClient",
        "import ray._private.services",
        "import ray\nray._private.state.state.get_draining_nodes()",
        "from ray.core.generated import common_pb2",
        "from ray.experimental.internal_kv import _internal_kv_put",
        "from ray.train import _internal",
    ],
)
def test_each_way_to_a_private_part_is_seen(source: str) -> None:
    assert private_names(source)


def test_public_names_are_let_through() -> None:
    assert private_names("import ray\nfrom ray.train import RunConfig\nray.util.get_node_ip_address()") == []


def parts_asked(tree: ast.Module) -> set[Part]:
    """The parts that a module asks about by `unavailable(part)`."""
    return {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "unavailable"
        and isinstance(node.args[0], ast.Constant)
    }


def door_used(tree: ast.Module) -> set[tuple[str, str]]:
    """The modules of the door that a module uses, each with a name that it uses of it."""
    door = ray_internals.__name__
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    whole = {alias.name for node in imports if node.module == door for alias in node.names}
    return {
        (node.module.rpartition(".")[2], alias.name)
        for node in imports
        if node.module is not None and node.module.startswith(f"{door}.")
        for alias in node.names
    } | {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole
    }


def private_names_of(module: str, name: str) -> set[str]:
    """The private names that a function or class of the door needs: its own, and those of its module outside of functions and classes."""
    tree = ast.parse((DOOR / f"{module}.py").read_text(encoding="utf-8"))
    defined = (ast.FunctionDef, ast.ClassDef)
    body = [node for node in tree.body if not isinstance(node, defined) or node.name == name]
    return set(private_names(ast.unparse(ast.Module(body, []))))


ASKED_BEFORE: dict[str, set[Part]] = {
    "driver_trainer.py": {"driver trainer"},
    "fork_server.py": {"forked workers"},
    "warm_server.py": {"own node"},  # OUTLIVES_SIGTERM is set by it alone
}
"""The parts about which the callers of a module ask."""


def unlisted(path: Path) -> list[str]:
    """The private names that a module needs through the door, but no part lists that is asked about."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = parts_asked(tree) | ASKED_BEFORE.get(path.name, set())
    listed = [f"{name.replace(':', '.')}." for part in parts for name in NEEDED[part]]
    needed = {name for module, used in door_used(tree) for name in private_names_of(module, used)}
    return sorted(name for name in needed if not any(one.startswith(f"{name}.") for one in listed))


@pytest.mark.scenario
def test_what_is_used_through_the_door_is_checked_by_a_part_that_is_asked_about() -> None:
    found = {path.name: names for path in (ROOT / "platform").rglob("*.py") if (names := unlisted(path))}
    assert found == {}


def test_a_name_that_no_part_lists_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {name: how for name, how in NEEDED["nodes"].items() if "available_resources" not in name}
    monkeypatch.setitem(NEEDED, "nodes", without)
    for asking in (
        ROOT / "platform" / "lockstep" / "attempts" / "cluster_capacity.py",
        DOOR / "driver_trainer.py",
    ):
        assert unlisted(asking) == ["ray._private.state.available_resources_per_node"]


@pytest.mark.usefixtures("asked_anew")
def test_all_parts_of_the_ray_that_is_pinned_are_known() -> None:
    assert set(NEEDED) == set(get_args(Part))
    assert {part: unavailable(part) for part in NEEDED} == dict.fromkeys(NEEDED)
    assert warnings_of_ray() == []


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("name", "parameters", "problem"),
    [
        ("ray.train.torch:TorchTrainer._gone", None, "is not there (AttributeError)"),
        ("ray.train.v3:TorchTrainer", None, "is not there (ModuleNotFoundError)"),
        ("ray.train.torch:TorchTrainer.fit", ("self", "more"), "takes self"),
    ],
)
def test_a_ray_that_is_not_the_one_known_is_told_with_the_name_that_differs(
    monkeypatch: pytest.MonkeyPatch, name: str, parameters: tuple[str, ...] | None, problem: str
) -> None:
    monkeypatch.setitem(NEEDED, "driver trainer", {**NEEDED["driver trainer"], name: parameters})
    reason = unavailable("driver trainer")
    assert reason is not None
    assert f"{name} {problem}" in reason
    (warning,) = warnings_of_ray()
    assert name in warning
    assert "public TorchTrainer" in warning
    assert "\n" not in warning


@dataclass
class Declares:
    told: int


class Sets(Declares):
    def start(self) -> None:
        self._calls: list[int] = []


@pytest.mark.parametrize(
    ("name", "attribute", "there"),
    [
        ("Declares", "told", True),
        ("Sets", "told", True),  # of the class above it
        ("Sets", "_calls", True),
        ("Sets", "start", True),
        ("Sets", "_callbacks", False),
        ("Declares", "_calls", False),
    ],
)
def test_an_attribute_of_instances_is_looked_up_in_their_class(
    name: str, attribute: str, there: bool
) -> None:
    assert (_lacks(f"{__name__}:{name}", (attribute,)) is None) == there


def of_ray(name: str) -> tuple[Any, Any]:
    """A class of Ray's, and the module that defines it."""
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    return found, sys.modules[found.__module__]


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("attribute", ATTRIBUTES["driver trainer"][_GROUP])
def test_an_attribute_that_ray_renames_closes_the_door(
    monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    """Ray's own class, but for a new name where the attribute is set: the run goes through the public trainer, with the warning."""
    found, home = of_ray(_GROUP)
    renamed = re.sub(rf"self\.{attribute}( =|:)", rf"self.{attribute}_of_group\1", inspect.getsource(found))
    names = dict(vars(home))
    exec(renamed, names)
    monkeypatch.setattr(_GROUP.replace(":", "."), names[found.__name__])
    reason = unavailable("driver trainer")
    assert reason is not None
    assert reason.endswith(f"{_GROUP} has no {attribute}")
    (warning,) = warnings_of_ray()
    assert "public TorchTrainer" in warning


@pytest.mark.usefixtures("asked_anew")
def test_without_private_parts_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A notice that cannot be put up is left out, and what a job takes along is not weighed."""
    monkeypatch.setenv(PUBLIC_ONLY, "1")
    board = RunRegistry("name", "off", 0.0)
    board._put(Notice("id", "name", "RUNNING", 0, 1, 0.0, 0.0, "off", "job"))  # no cluster: a call would fail
    assert pack(tmp_path) is None


@pytest.mark.usefixtures("asked_anew")
def test_a_process_that_made_an_actor_before_has_the_same_parts() -> None:
    """Ray adds a parameter to each method of a class that it makes an actor, in place."""
    import ray

    module, _, name = _CONTROLLER.partition(":")
    controller = getattr(importlib.import_module(module), name)
    ray.remote(controller)
    assert "_ray_trace_ctx" in inspect.signature(controller.run).parameters
    assert unavailable("driver trainer") is None
