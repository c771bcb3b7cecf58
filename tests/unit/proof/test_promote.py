"""A promotion registers a verified checkpoint, whole; whatever fails, the registry is as it was."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep import train
from lockstep.calls import problems, promotion
from lockstep.calls.promotion import Promoted, promote
from lockstep.calls.verify import verify
from lockstep.checkpoint.runs.pins import ALIAS, pin, pinned, unpin
from lockstep.checkpoint.runs.run_checkpoints import pin_aliased
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.storage.opening import open_storage
from lockstep.errors import Problem, RecordError
from lockstep.proof.verification import Verified
from lockstep.record.mirror.mlflow import registry
from lockstep.record.mirror.mlflow.models import Models
from lockstep.record.mirror.stores import find_copies
from lockstep.record.problems import HALF_PROMOTED
from tests.forked import Forked
from tests.raised import raises
from tests.unit.proof.test_attest import Keys
from tests.unit.proof.test_verify import change_ledger, document
from tests.unit.record.conftest import THIRD_PARTY

pytestmark = [pytest.mark.filterwarnings(text) for text in THIRD_PARTY]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("promoted")


@pytest.fixture(scope="module")
def uri(place: Path) -> str:
    return f"sqlite:///{place}/mlflow.db"


@pytest.fixture(scope="module")
def run(place: Path, uri: str) -> Path:
    """The folder of a run of 12 steps, with checkpoints after 4, 8 and 12, evaluated after 5, 10 and 12."""
    spec = document(place / "runs", record={"uri": uri, "digest_every": 1}, evaluate={"every": {"steps": 4}})
    return Path(train(spec, local=True).folder)


@pytest.fixture
def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def promoted(run: Path, uri: str, target: str, **options: Any) -> Promoted:
    return promote(run.name, target, uri=uri, storage=run.parent, **options)


def registered(client: Any) -> dict[str, Any]:
    """Everything that the registry has: of each name its aliases, and its versions with their sources."""
    return {
        model.name: (
            {alias: str(v) for alias, v in client.get_registered_model(model.name).aliases.items()},
            {str(v.version): v.source for v in client.search_model_versions(f"name = '{model.name}'")},
        )
        for model in client.search_registered_models()
    }


def models(client: Any, run: Path) -> dict[str, tuple[str, str, bool]]:
    """The id and the state of each checkpoint's model, and whether it has files."""
    of_run = Models(client, client.get_run(run.name).info.experiment_id, run.name)
    return {model.name: (model.model_id, model.status, of_run.has_files(model)) for model in of_run.all()}


@pytest.mark.scenario
def test_a_promoted_checkpoint_is_registered_whole_with_its_proofs(
    run: Path, uri: str, client: Any, tmp_path: Path
) -> None:
    """The reference in the store gets its files, stays the model that it was, and keeps its metrics; the alias names it."""
    before = models(client, run)
    assert before["checkpoint-8"][1:] == ("READY", False)
    keys = Keys(tmp_path)
    told = promoted(run, uri, "whole@champion", step=8, key=keys.private)
    version = client.get_model_version_by_alias("whole", "champion")
    assert (str(version.version), version.run_id) == (told.version, run.name)
    assert version.source == f"models:/{before['checkpoint-8'][0]}"
    assert models(client, run)["checkpoint-8"] == (before["checkpoint-8"][0], "READY", True)
    assert {m.key for m in client.get_logged_model(told.model_id).metrics} >= {"eval/loss"}
    summary = json.loads((run / "summary.json").read_text())
    assert version.tags["lockstep.identity"] == summary["identity"]
    assert version.tags["lockstep.step"] == "8" and len(version.tags["lockstep.weights_digest"]) == 16
    assert version.tags["lockstep.verified"] == "steps 1 to 8, 9 to 9: every bit is equal"
    digest, path = version.tags["lockstep.attestation"].split()
    assert path == told.statement and digest.startswith("sha256:")
    assert path in {item.path for item in client.list_artifacts(run.name, "attestation")}
    assert "lockstep.signed_by" in version.tags and registry.PENDING not in version.tags
    there = RunFolder.open(open_storage(str(run.parent)), run.name)
    assert 8 in pinned(there)
    copy = next(copy for copy in find_copies(uri, run.name) if copy.step == 8)
    aside = tmp_path / "copy"
    aside.mkdir()
    copy.download(aside)
    saved = {path.name: path.read_bytes() for path in (run / "step-000000008").iterdir()}
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == saved


@pytest.mark.scenario
def test_the_best_and_the_newest_are_chosen(run: Path, uri: str, client: Any) -> None:
    """And the same checkpoint promoted again is the version that it was."""
    rows = {m.step: m.value for m in client.get_metric_history(run.name, "eval/loss")}
    best = min((4, 8, 12), key=lambda step: rows[step])
    first = promoted(run, uri, "chosen@best", best=True)
    newest = promoted(run, uri, "chosen@newest")
    again = promoted(run, uri, "chosen@best", best=True)
    assert (first.step, newest.step) == (best, 12)
    assert again.version == first.version == again.previous
    aliases, versions = registered(client)["chosen"]
    assert aliases == {"best": first.version, "newest": newest.version} and len(versions) == len({best, 12})


@pytest.mark.parametrize("column", ["loss", "weights_digest"])
def test_a_run_that_does_not_verify_is_refused(
    run: Path, uri: str, client: Any, tmp_path: Path, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of the record that was changed; the control is every other test."""
    before = registered(client), models(client, run)
    ledger = (run / "ledger.parquet").read_bytes()
    change = (lambda value: value * (1 + 2**-52)) if column == "loss" else (lambda value: value ^ 1)
    change_ledger(run, 7 if column == "loss" else 8, column, change)
    try:
        with raises(problems.PROMOTION_REFUSED) as refused:
            promoted(run, uri, "refused@champion", step=8)
    finally:
        (run / "ledger.parquet").write_bytes(ledger)
    assert refused.value.exit_code == 1
    assert (registered(client), models(client, run)) == before


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("forged", [False, True])
def test_a_copy_in_the_store_that_is_not_what_was_verified_is_not_registered(
    run: Path, uri: str, client: Any, forged: bool
) -> None:
    """A flipped bit, and another checkpoint whose hashes fit; the control is the copy as it was."""
    copy = Path(
        client.get_logged_model(models(client, run)["checkpoint-12"][0]).artifact_location.removeprefix(
            "file://"
        )
    )
    saved = {path.name: path.read_bytes() for path in copy.iterdir()}
    other = {path.name: path.read_bytes() for path in (run / "step-000000008").iterdir()}
    name = next(name for name in saved if name.endswith(".safetensors"))
    flipped = {**saved, name: saved[name][:-1] + bytes([saved[name][-1] ^ 1])}
    before = registered(client), models(client, run)
    try:
        replace_files(copy, other if forged else flipped)
        with raises(problems.PROMOTION_COPY, run=run.name, step=12):
            promoted(run, uri, "copied@champion")
        assert (registered(client), models(client, run)) == before
    finally:
        replace_files(copy, saved)
    assert promoted(run, uri, f"copied-{forged}@champion").step == 12


def replace_files(folder: Path, files: dict[str, bytes]) -> None:
    """Have a folder hold these files alone; they may be other names of the checkpoint's, which stay."""
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


CALLS = ("create_registered_model", "create_model_version", "set_registered_model_alias")


@pytest.mark.every(3)
@pytest.mark.parametrize("acts", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("there", [False, True])
def test_what_fails_half_way_is_undone(
    run: Path, uri: str, client: Any, monkeypatch: pytest.MonkeyPatch, call: str, acts: bool, there: bool
) -> None:
    """Each call that changes the registry fails, before it acts or with its answer lost; also where the alias pointed to another version."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    name = f"undone-{call}-{acts}-{there}"
    if there:
        register(uri, run, 12, f"{name}@champion")
    before = registered(client), models(client, run)
    real = getattr(MlflowClient, call)

    def fails(self: Any, *given: Any, **named: Any) -> Any:
        if acts:
            real(self, *given, **named)
        monkeypatch.undo()
        raise MlflowException("the server went away")

    monkeypatch.setattr(MlflowClient, call, fails)
    if there and call == "create_registered_model":
        monkeypatch.undo()
        return
    with pytest.raises(RecordError, match="went away"):
        register(uri, run, 4, f"{name}@champion")
    assert (registered(client), models(client, run)) == before


@pytest.mark.every(3)
@pytest.mark.parametrize("acts", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("published", [False, True])
def test_what_fails_takes_nothing_from_another_that_succeeded_meanwhile(
    run: Path, uri: str, client: Any, monkeypatch: pytest.MonkeyPatch, call: str, acts: bool, published: bool
) -> None:
    """Of the same checkpoint under the same name, at each call that changes the registry; its model is there before, or the first one makes it."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    if not published:
        Models(client, client.get_run(run.name).info.experiment_id, run.name).delete("checkpoint-4")
    name = f"both-{call}-{acts}-{published}"
    real, others = getattr(MlflowClient, call), []

    def fails(self: Any, *given: Any, **named: Any) -> Any:
        if acts:
            real(self, *given, **named)
        monkeypatch.undo()
        others.append(register(uri, run, 4, f"{name}@champion"))
        raise MlflowException("the server went away")

    monkeypatch.setattr(MlflowClient, call, fails)
    with pytest.raises(RecordError, match="went away"):
        register(uri, run, 4, f"{name}@champion")
    version = client.get_model_version_by_alias(name, "champion")
    assert [str(version.version)] == [other.version for other in others]
    assert version.source == f"models:/{others[0].model_id}"
    assert models(client, run)["checkpoint-4"] == (others[0].model_id, "READY", True)


def test_a_promotion_that_fails_leaves_the_pin_of_another_that_succeeded_meanwhile(
    run: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.open(open_storage(str(run.parent)), run.name)
    unpin(folder, 4, ALIAS)

    def fails(*_: Any) -> Any:
        pin(folder, 4, ALIAS)  # which finds it pinned
        register(uri, run, 4, "pinned@champion")
        raise RecordError("interrupted")

    monkeypatch.setattr(promotion, "_checkpoint_facts", fails)
    with pytest.raises(RecordError, match="interrupted"):
        promoted(run, uri, "pinned@champion", step=4)
    assert 4 in pinned(folder)
    pin_aliased(str(run.parent), run.name, frozenset())  # of the next save, once no alias is left
    assert 4 not in pinned(folder)


def register(uri: str, run: Path, step: int, target: str) -> registry.Registered:
    """What a promotion does after it has verified."""
    folder = run / f"step-{step:09}"
    name, alias = target.split("@")
    return registry.promote(uri, run.name, step, str(folder), folder, name=name, alias=alias, tags={"lockstep.step": str(step)})  # fmt: skip


def test_an_undoing_that_fails_says_what_to_look_at(
    run: Path, uri: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def away(*_: Any, **__: Any) -> Any:
        raise MlflowException("the server went away")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "set_registered_model_alias", away)
        patched.setattr(MlflowClient, "delete_model_version", away)
        away_again = re.compile("the server went away$")
        with raises(HALF_PROMOTED, got=away_again, further=away_again, name="left", alias="champion"):
            register(uri, run, 4, "left@champion")
    (left,) = client.search_model_versions("name = 'left'")
    assert left.tags[registry.PENDING] and not registered(client)["left"][0]
    assert register(uri, run, 4, "left@champion").version == str(
        left.version
    )  # the same command again mends it
    assert registered(client)["left"][0] == {"champion": str(left.version)}
    assert registry.PENDING not in client.get_model_version("left", left.version).tags


def register_until_killed(uri: str, run: Path, call: str, dying: Path) -> None:
    from mlflow import MlflowClient

    def dies(*_: Any, **__: Any) -> None:
        dying.touch()
        time.sleep(600)

    setattr(MlflowClient, call, dies)
    register(uri, run, 4, f"killed-{call}@champion")


@pytest.mark.every(2)
@pytest.mark.parametrize("call", ["create_model_version", "set_registered_model_alias"])
def test_the_same_command_mends_what_a_kill_left(
    run: Path, uri: str, client: Any, tmp_path: Path, call: str
) -> None:
    """SIGKILL between two calls: nobody sees the alias, and the next promotion leaves one version."""
    process = Forked(register_until_killed, uri, run, call, tmp_path / "dying")
    until = time.monotonic() + 60
    while not (tmp_path / "dying").exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert registered(client)[f"killed-{call}"][0] == {}
    version = register(uri, run, 4, f"killed-{call}@champion").version
    aliases, versions = registered(client)[f"killed-{call}"]
    assert (aliases, list(versions)) == ({"champion": version}, [version])
    assert models(client, run)["checkpoint-4"][1:] == ("READY", True)


@pytest.mark.parametrize(
    ("target", "options", "problem", "facts"),
    [
        ("digits", {}, problems.PROMOTION_NAME, {"got": "digits"}),
        ("digits@", {}, problems.PROMOTION_NAME, {"got": "digits@"}),
        ("digits@v3", {}, problems.PROMOTION_NAME, {"got": "digits@v3"}),
        ("di gits@champion", {}, problems.PROMOTION_NAME, {"got": "di gits@champion"}),
        ("digits@champion", {"step": 5}, problems.PROMOTION_STEP, {"got": 5, "wanted": "4, 8, 12"}),
        ("digits@champion", {"step": 4, "best": True}, problems.PROMOTION_CHOICES, {}),
        ("digits@champion", {"uri": "off"}, problems.PROMOTION_STORE, {}),
    ],
)
def test_a_wrong_choice_is_refused(
    run: Path,
    uri: str,
    client: Any,
    target: str,
    options: dict[str, Any],
    problem: Problem[Any],
    facts: dict[str, Any],
) -> None:
    before = registered(client), models(client, run)
    with raises(problem, **facts) as refused:
        promoted(run, options.pop("uri", uri), target, **options)
    assert refused.value.exit_code == 2
    assert (registered(client), models(client, run)) == before


@pytest.mark.scenario
def test_a_record_that_only_its_store_has_is_compared_with_its_seal(
    run: Path, uri: str, client: Any, tmp_path: Path
) -> None:
    artifacts = Path(client.get_run(run.name).info.artifact_uri.removeprefix("file://"))
    aside = run.rename(run.with_name("aside"))

    def verified() -> Verified:
        return verify(run.name, all_steps=True, uri=uri, storage=tmp_path, local=True)

    try:
        found = verified()
        assert found.same and found.ended and "environment.json" in found.told
        kept = (artifacts / "environment.json").read_bytes()
        (artifacts / "environment.json").write_bytes(kept.replace(b'"hostname": "', b'"hostname": "x'))
        found = verified()
        assert found.first_difference is not None and found.first_difference.quantity == "environment.json"
        (artifacts / "environment.json").write_bytes(kept)
    finally:
        aside.rename(run)
