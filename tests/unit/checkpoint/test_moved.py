"""A run whose folder its owner has moved to another disk, and linked, is one like any other; links within it lead nowhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.checkpoint import problems
from lockstep.checkpoint.storage.local import LocalStorage
from tests.raised import raises


def content(storage: LocalStorage) -> dict[str, bytes]:
    """Everything that a run did: written, published, listed, read."""
    storage.begin_staging("run/attempt-0001", "owner")
    storage.write("run/step-1/model", [b"weights"], staging="run/attempt-0001")
    storage.create("run/step-1/manifest.json", b"{}")
    storage.put("run/owner.json", b"[]")
    assert [item.name for item in storage.list("run")] == ["attempt-0001", "owner.json", "step-1"]
    assert storage.exists("run/step-1/model")
    storage.delete("run/step-1/model", staging="run/attempt-0001")
    storage.end_staging("run/attempt-0001")
    with storage.open("run/step-1/manifest.json") as file:
        assert file.read(10) == b"{}"
    return {name: storage.read(f"run/{name}") for name in ("owner.json", "step-1/manifest.json")}


def test_a_moved_run_is_like_one_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").symlink_to(tmp_path / "disk" / "run")
    assert content(LocalStorage(tmp_path / "runs")) == content(LocalStorage(tmp_path / "plain"))
    shutil.rmtree(tmp_path / "plain" / "run")
    (tmp_path / "disk" / "run").rename(tmp_path / "plain" / "run")
    assert LocalStorage(tmp_path / "plain").read("run/owner.json") == b"[]"


@pytest.mark.parametrize("where", ["run/step-1", "other", "run/step-1/model"])
def test_a_link_within_a_run_or_to_another_name_is_refused(tmp_path: Path, where: str) -> None:
    """Also in a run that was moved."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "model").write_bytes(b"secret")
    home = tmp_path / "disk" / "run"
    home.mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").symlink_to(home)
    link = tmp_path / "runs" / where
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret / "model" if where.endswith("model") else secret)
    storage, name = LocalStorage(tmp_path / "runs"), where if where.endswith("model") else f"{where}/model"
    for call in (
        storage.read,
        storage.exists,
        storage.list,
        storage.delete,
        lambda path: storage.put(path, b""),
    ):
        with raises(problems.LEADS_OUT):
            call(name)
    assert (secret / "model").read_bytes() == b"secret"
