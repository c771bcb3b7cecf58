"""Ray's settings: of a name that it does not know it takes no notice."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lockstep.clusters.ray_settings import RAY_SETTINGS, UNSEEN


def test_ray_has_every_setting_of_its_own_processes() -> None:
    spec = find_spec("ray")
    assert spec is not None and spec.origin is not None
    raylet = (Path(spec.origin).parent / "core/src/ray/raylet/raylet").read_bytes()
    names = [name.removeprefix("RAY_") for name in RAY_SETTINGS | UNSEEN]
    of_processes = [name for name in names if name[0].islower()]
    assert len(of_processes) > 5
    assert [name for name in of_processes if name.encode() not in raylet] == []
    assert b"worker_register_timeout_hours" not in raylet
