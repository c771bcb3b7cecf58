"""An artifact and its description get their names together or not at all; nothing of the user's is lost, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep.checkpoint.stored_tensor import in_memory
from lockstep.errors import StorageError
from lockstep.export import artifact, exporting, formats, problems, publication
from lockstep.training import stored_weights
from lockstep.training.integrity.state_digest import weights_digest
from tests.forked import Forked
from tests.raised import raises
from tests.unit.export.test_export import contents

FORMS = ["safetensors", "shards"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def exported_weights(run: Path, form: str, value: int = 0, name: str = "final") -> Path:
    """Weights that are all `value`, exported into a run's folder: three tensors, each in a shard of its own."""
    source = run.parent / "weights.safetensors"
    save_file({f"layer.{i}": torch.full((100,), float(value)) for i in range(3)}, source)
    state = stored_weights.stored_folder(source)
    weights = exporting.Weights("run", 1, name, weights_digest(state, in_memory), state)
    export_format = formats.Shards().limited("500B") if form == "shards" else formats.FORMATS[form]
    assert isinstance(export_format, formats.Safetensors)
    return exporting.export_weights(weights, export_format, run)


def files(run: Path) -> dict[str, str]:
    return {name: digest for name, digest in contents(run).items() if digest}


# --- together or not at all -------------------------------------------------------------------------------------


def refused() -> None:
    raise OSError(5, "Input/output error")


def interrupted() -> None:
    raise KeyboardInterrupt


def killed() -> None:
    os._exit(9)


def with_fault(number: int, fault: Callable[[], None], run: Path, form: str) -> bool:
    """Export other weights, with a fault before or after a rename or a flush, the `number`th of these; whether there were so many."""
    count = 0

    def faulty(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Path) -> Any:
            nonlocal count
            count += 2
            if count - 1 == number:
                fault()
            found = call(*arguments)
            if count == number:
                fault()
            return found

        return called

    with pytest.MonkeyPatch.context() as patched, suppress(StorageError, KeyboardInterrupt):
        patched.setattr(Path, "rename", faulty(Path.rename))
        patched.setattr(Path, "replace", faulty(Path.replace))
        if fault is not killed:
            patched.setattr(publication, "flush", faulty(publication.flush))
        exported_weights(run, form, 1)
    return count >= number


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("fault", [refused, interrupted])
def test_a_failure_at_any_rename_or_flush_puts_back_what_was_there(
    run: Path, form: str, there: bool, fault: Callable[[], None]
) -> None:
    if there:
        exported_weights(run, form)
    before = files(run)
    number = 1
    while with_fault(number, fault, run, form):
        assert files(run) == before
        number += 1
    assert number > 12
    assert files(run) != before


@pytest.mark.scenario
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("there", [True, False])
def test_the_export_after_one_that_was_killed_at_any_rename_puts_back_what_was_there(
    run: Path, form: str, there: bool
) -> None:
    """Also where it is an export of other weights, and nothing is left of the one that was killed."""
    if there:
        exported_weights(run, form)
    exported_weights(run, form, name="best")
    before = files(run)
    number, code = 1, 9
    while code == 9:
        process = Forked(with_fault, number, killed, run, form)
        code = process.wait()
        exported_weights(run, form, name="best")
        assert code == 0 or files(run) == before, number
        number += 1
    assert number > 4
    assert files(run) != before


def test_what_is_not_put_back_is_kept_and_told(run: Path) -> None:
    """A disk that refuses every rename once the old artifact is away: the next export puts it back."""
    exported_weights(run, "shards")
    before = files(run)
    rename, made = Path.rename, []

    def renamed(path: Path, target: Path) -> Path:
        made.append(path)
        return rename(path, target) if len(made) <= 2 else refused()  # type: ignore[func-returns-value, return-value]

    with pytest.MonkeyPatch.context() as patched, raises(problems.NOT_PUT_BACK, got="Input/output error"):
        patched.setattr(Path, "rename", renamed)
        exported_weights(run, "shards", 1)
    assert files(run) != before
    exported_weights(run, "shards", name="best")
    assert {name: digest for name, digest in files(run).items() if "best" not in name} == before


# --- what the user put there ------------------------------------------------------------------------------------


def test_what_lies_beside_the_shards_is_carried_over(run: Path) -> None:
    """And nothing of the artifact that was there before; the description is of the artifact alone."""
    folder = exported_weights(run, "shards")
    shards = sorted(path.name for path in folder.iterdir())
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "words.txt").write_text("a word\n")
    (folder / "link").symlink_to("nowhere")
    save_file({"layer": torch.zeros(1)}, run.parent / "one.safetensors")
    state = stored_weights.stored_folder(run.parent / "one.safetensors")
    weights = exporting.Weights("run", 1, "final", weights_digest(state, in_memory), state)
    exporting.export_weights(weights, formats.Shards(), run)
    assert len(shards) == 4
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "link", stored_weights.SINGLE, "tokenizer",
    ]  # fmt: skip
    assert (folder / "tokenizer" / "words.txt").read_text() == "a word\n"
    assert (folder / "link").readlink() == Path("nowhere")
    assert artifact.read(folder).files == (stored_weights.SINGLE,)


def a_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")


def a_folder(path: Path) -> None:
    a_file(path / "mine")


def a_dangling_link(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("form", "name", "put"),
    [
        ("safetensors", "export", a_file),
        ("safetensors", "export", a_dangling_link),
        ("shards", "export/shards", a_file),
        ("safetensors", "export/safetensors/final.json", a_folder),
        ("safetensors", "export/safetensors/final.safetensors", a_folder),
        ("shards", "export/shards/final", a_file),
        ("shards", "export/shards/final", a_dangling_link),
        ("shards", "export/shards/final", a_folder),
    ],
)
def test_what_is_in_the_way_of_an_artifact_is_named_and_stays(
    run: Path, form: str, name: str, put: Callable[[Path], None]
) -> None:
    put(run / name)
    before = contents(run)
    with raises(problems.IN_THE_WAY, file=run / name):
        exported_weights(run, form)
    assert contents(run) == before


def test_a_file_of_the_users_with_the_name_of_a_new_shard_stays(run: Path) -> None:
    folder = exported_weights(run, "shards")
    (folder / stored_weights.SINGLE).write_text("mine")
    before = contents(run)
    state = stored_weights.stored_folder(run.parent / "weights.safetensors")
    weights = exporting.Weights("run", 1, "final", weights_digest(state, in_memory), state)
    with raises(problems.IN_THE_WAY, file=folder / stored_weights.SINGLE):
        exporting.export_weights(weights, formats.Shards(), run)
    assert contents(run) == before


def test_a_folder_of_a_run_that_is_gone_is_not_made_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = artifact.description

    def removed(path: Path) -> Path:
        shutil.rmtree(run, ignore_errors=True)
        return described(path)

    monkeypatch.setattr(exporting, "description", removed)
    with raises(problems.FOLDER_GONE, folder=run):
        exported_weights(run, "safetensors")
    assert not run.exists()
