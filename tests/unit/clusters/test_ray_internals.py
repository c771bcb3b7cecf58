"""Ray's private parts: behind one door, checked before they are used, and nowhere else."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from lockstep.clusters import ray_internals
from lockstep.clusters.noticeboard import Notice, Noticeboard
from lockstep.clusters.packaging import pack
from lockstep.clusters.ray_internals import (
    _CONTROLLER,
    NEEDED,
    PUBLIC_ONLY,
    Part,
    _differs,
    unavailable,
    warnings_of_ray,
)

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


@pytest.mark.usefixtures("asked_anew")
def test_without_private_parts_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A notice that cannot be put up is left out, and what a job takes along is not weighed."""
    monkeypatch.setenv(PUBLIC_ONLY, "1")
    board = Noticeboard("name", "off", 0.0)
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
