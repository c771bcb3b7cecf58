"""What a run is said to be: a statement holds for the run that it was made of, and for nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
from safetensors.torch import load_file, save_file

from lockstep import train
from lockstep.calls import problems as calls_problems
from lockstep.calls.attestation import Attested, Checked, attest, check_statement
from lockstep.errors import RecordError, SpecError
from lockstep.job.identity import identity_digest
from lockstep.proof import problems as proof_problems
from lockstep.proof import signatures
from lockstep.record.ledger.rows import VERSION
from tests.in_process import here
from tests.raised import raises
from tests.unit.proof.forged_runs import sealed_again
from tests.unit.proof.test_verify import (
    BESIDE,
    SOURCE,
    change_ledger,
    document,
    drop,
    forge_result,
    without_digests,
)
from tests.unit.proof.test_verify import plain as plain
from tests.unit.proof.verified_jobs import PLANTED


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 12 steps, with checkpoints after 4, 8 and 12."""
    storage = tmp_path_factory.mktemp("recorded")
    return Path(train(document(storage, ema=0.9, rehearsal="off"), local=True).folder)


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / recorded.name))


class Keys:
    def __init__(self, folder: Path, name: str = "key", kind: Any = ed25519.Ed25519PrivateKey) -> None:
        made = kind.generate()
        self.private, self.public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
        pem, public = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        plain = serialization.NoEncryption()
        self.private.write_bytes(made.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
        self.public.write_bytes(made.public_key().public_bytes(pem, public))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def attested(run: Path, out: Path, key: Path | None = None) -> Attested:
    return attest(run.name, key=key, out=out, uri="off", storage=run.parent)


def checked(run: Path, statement: Path, key: Path | None = None, **more: Any) -> Checked:
    return check_statement(statement, key=key, uri="off", storage=run.parent, **{"seed": 5, **more})


def payload(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text())
    found: dict[str, Any] = json.loads(base64.b64decode(document["payload"]))
    return found


def test_a_statement_has_in_totos_form_and_names_what_the_run_left(
    recorded: Path, tmp_path: Path, keys: Keys
) -> None:
    out = tmp_path / "run.intoto.json"
    told = attested(recorded, out, keys.private)
    said = payload(out)
    assert json.loads(out.read_text())["payloadType"] == "application/vnd.in-toto+json"
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert said["predicateType"] == f"urn:lockstep-train:run:v{VERSION}"
    for subject in said["subject"]:
        content = (recorded.parent / subject["name"]).read_bytes()
        assert subject["digest"] == {"sha256": hashlib.sha256(content).hexdigest()}
    summary = json.loads((recorded / "summary.json").read_text())
    predicate = said["predicate"]
    assert predicate["weights"] == {"final": summary["weights_digest"], "ema": summary["ema_digest"]}
    assert predicate["identity"] == summary["identity"] == identity_digest(predicate["fields"])
    assert predicate["ledger"]["segments"][-1]["sha256"] == told.chain
    assert set(predicate["digests"]) == {"weights", "optimizer", "ema"}
    assert list(predicate["source"]) == sorted(predicate["source"])


@pytest.mark.every(2)
@pytest.mark.parametrize("signed", [True, False])
def test_an_honest_run_is_as_stated(recorded: Path, tmp_path: Path, keys: Keys, signed: bool) -> None:
    out = tmp_path / "run.intoto.json"
    attested(recorded, out, keys.private if signed else None)
    found = checked(recorded, out, keys.public if signed else None)
    assert found.same
    assert found.signature == ("good" if signed else "none")
    assert found.verified is not None and found.verified.steps == 4
    assert "fields.json" not in found.verified.told
    assert checked(recorded, out).signature == ("not checked" if signed else "none")


@pytest.mark.scenario
def test_a_run_whose_params_have_a_secret_is_stated_and_its_identity_is_not_proven(tmp_path: Path) -> None:
    job = {"use": "tests.unit.proof.verified_jobs:Small", "params": {"api_key": "sk-" + 40 * "a"}}
    run = Path(train(document(tmp_path / "runs", job=job, rehearsal="off"), local=True).folder)
    assert "aaaa" not in (run / "fields.json").read_text()
    out = tmp_path / "run.intoto.json"
    attested(run, out)
    found = checked(run, out)
    assert found.same and found.verified is not None
    assert found.verified.told["fields.json"] == ("job.params.api_key", "and with them the identity")


def test_the_spans_follow_from_the_seed(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.intoto.json"
    attested(recorded, out)
    drawn = {}
    for seed in (0, 3, 6):
        found = checked(recorded, out, seed=seed).verified
        assert found is not None
        drawn[seed] = found.spans
    again = checked(recorded, out, seed=3).verified
    assert again is not None and again.spans == drawn[3]
    assert len({str(one) for one in drawn.values()}) == 3


def test_another_key_and_a_changed_statement_are_found(recorded: Path, tmp_path: Path, keys: Keys) -> None:
    out = tmp_path / "run.intoto.json"
    attested(recorded, out, keys.private)
    assert checked(recorded, out, Keys(tmp_path, "other").public).signature == "bad"
    envelope = json.loads(out.read_text())
    said = payload(out)
    said["predicate"]["weights"]["final"] = "0" * 64
    envelope["payload"] = base64.b64encode(json.dumps(said).encode()).decode()
    out.write_text(json.dumps(envelope))
    found = checked(recorded, out, keys.public)
    assert (found.same, found.signature, found.verified) == (False, "bad", None)
    attested(recorded, out)
    assert checked(recorded, out, keys.public).signature == "bad"  # nobody has signed it


def forge_weights(run: Path) -> None:
    path = run / "weights" / "final.safetensors"
    weights = load_file(path)
    weights["out.bias"][0] += 1.0
    save_file(weights, path)


def forge_source(run: Path) -> None:
    path = run / "source" / "tests" / "unit" / "proof" / "verified_jobs.py"
    path.write_text(path.read_text() + "\n# another line\n")


def forge_field(run: Path) -> None:
    fields = json.loads((run / "fields.json").read_text())
    (run / "fields.json").write_text(json.dumps({**fields, "data.train_samples": 57}))


def forge_summary(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "identity": "0" * 64}))


FORGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights": (forge_weights, "predicate.weights.final"),
    "source": (forge_source, "predicate.source.tests/unit/proof/verified_jobs.py"),
    "field": (forge_field, "predicate.data.data.train_samples"),
    "identity": (forge_summary, "predicate.identity"),
    "row": (lambda run: change_ledger(run, 5, "loss", lambda value: value / 2), "predicate.ledger.segments[0].sha256"),
    "digest": (
        lambda run: change_ledger(run, 12, "weights_digest", lambda value: value ^ 1), "predicate.digests.weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        "weights",
        "source",
        "row",
        *(pytest.param(kind, marks=pytest.mark.exact) for kind in ("field", "identity", "digest")),
    ],
)
def test_a_record_that_was_changed_after_it_was_stated_is_found(run: Path, tmp_path: Path, kind: str) -> None:
    """And one that was changed before cannot be stated, where it contradicts itself."""
    out = tmp_path / "run.intoto.json"
    attested(run, out)
    forge, what = FORGED[kind]
    forge(run)
    found = checked(run, out)
    assert not found.same
    assert found.disagreement is not None
    assert found.disagreement.what == what
    if kind == "row":  # nothing of the record contradicts it once it is sealed again; training does
        with raises(calls_problems.RECORD_CONTRADICTS, what="ledger.parquet"):
            attested(run, out)
        sealed_again(run)
        attested(run, out)
        again = checked(run, out, share=1.0)
        assert again.disagreement is None
        assert again.verified is not None and again.verified.first_difference is not None
        assert again.verified.first_difference[:3] == (5, None, "loss")
        return
    with raises(calls_problems.RECORD_CONTRADICTS):
        attested(run, tmp_path / "again.json")
    assert not (tmp_path / "again.json").exists()


def test_a_file_beside_the_job_is_stated_and_one_that_was_changed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a field of its own, and no part in the digest of the job's package."""
    name, text = "own/scale.py", "SCALE = 1.0\n"
    for module in [module for module in sys.modules if module.partition(".")[0] in {"own", "scale"}]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "job.py").write_text(SOURCE.replace("from own.scale import SCALE", BESIDE))
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    spec = document(tmp_path / "runs", job={"use": "own.job:Own"}, batch={"global": 4, "micro": 2})
    run, out = Path(train(spec, local=True).folder), tmp_path / "run.intoto.json"
    attested(run, out)
    said = json.loads(out.read_text())["predicate"]
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert said["source"][name] == said["fields"][f"job.source.{name}"] == digest
    assert checked(run, out).same
    (run / "source" / name).write_text("SCALE = 2.0\n")
    found = checked(run, out)
    assert found.disagreement is not None
    assert found.disagreement.what == f"predicate.source.{name}"
    other = hashlib.sha256(b"SCALE = 2.0\n").hexdigest()
    with raises(calls_problems.RECORD_CONTRADICTS, what=f"source/{name}", wanted=digest, got=other):
        attested(run, tmp_path / "again.json")
    assert not (tmp_path / "again.json").exists()


def test_a_ledger_whose_first_rows_are_missing_is_not_stated(run: Path, tmp_path: Path) -> None:
    table = pq.read_table(run / "ledger.parquet")
    pq.write_table(table.slice(5), run / "ledger.parquet")
    with raises(
        calls_problems.RECORD_CONTRADICTS, what="ledger", wanted="12 steps", got="one without step 1"
    ):
        attested(run, tmp_path / "run.intoto.json")
    assert not (tmp_path / "run.intoto.json").exists()


def test_weights_that_cannot_be_read_and_a_file_that_cannot_be_written_are_one_line(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    out = tmp_path / "file" / "run.intoto.json"
    with raises(calls_problems.OUT_UNWRITABLE, file=out, got="File exists"):
        attested(run, out)
    stated = tmp_path / "run.intoto.json"
    attested(run, stated)
    path = run / "weights" / "final.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    for call in (lambda: attested(run, tmp_path / "other.json"), lambda: checked(run, stated)):
        with raises(proof_problems.WEIGHTS_UNREADABLE, file=path, got=re.compile("^SafetensorError: ")):
            call()
    assert not (tmp_path / "other.json").exists()


@pytest.mark.exact
@pytest.mark.parametrize("content", [None, "{}", "[]", '{"identity": 3}'])
def test_a_summary_that_is_none_is_one_line(run: Path, tmp_path: Path, content: str | None) -> None:
    (run / "summary.json").unlink()
    if content is not None:
        (run / "summary.json").write_text(content)
    with pytest.raises(
        (SpecError, RecordError), match=rf"summary.*`lockstep record check {run.name} --repair`"
    ):
        attested(run, tmp_path / "s.json")


def test_a_run_that_was_never_trained_so_is_found_by_training(recorded: Path, tmp_path: Path) -> None:
    """Its record is consistent; in the drawn span it has a sample that nobody else has."""
    PLANTED["label"] = 3
    try:
        lied = Path(train(document(tmp_path, rehearsal="off"), local=True).folder)
    finally:
        PLANTED.clear()
    out = tmp_path / "run.intoto.json"
    attested(lied, out)
    assert not checked(lied, out, share=1.0).same


def test_the_commands_answer_with_an_object_and_an_exit_code(
    recorded: Path,
    tmp_path: Path,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    where = ("--uri", "off", "--storage", str(recorded.parent))
    code, out, _ = here(
        monkeypatch, capfd, tmp_path, "attest", recorded.name, "--key", str(keys.private), *where, "--json"
    )
    told = json.loads(out)
    assert (code, told["steps"]) == (0, 12)
    path = tmp_path / f"{recorded.name[:8]}.intoto.json"
    assert path.exists()
    words = ("verify", "--statement", str(path), "--key", str(keys.public), "--local", *where)
    code, out, _ = here(monkeypatch, capfd, tmp_path, *words, "--seed", "4", "--json")
    answer = json.loads(out)
    assert (code, answer["same"], answer["statement"]["signature"], answer["statement"]["seed"]) == (
        0,
        True,
        "good",
        4,
    )
    assert answer["statement"]["signed_by"] == told["signed_by"]
    code, out, _ = here(monkeypatch, capfd, tmp_path, *words)
    assert code == 0
    assert "signature         good, of key " in out
    assert "\nseed              " in out


def test_mistakes_are_told_in_one_line(recorded: Path, run: Path, tmp_path: Path, keys: Keys) -> None:
    out = tmp_path / "run.intoto.json"
    with raises(proof_problems.NO_PRIVATE_KEY, file=keys.public):
        attested(recorded, out, keys.public)
    (tmp_path / "text.json").write_text("{}")
    with raises(proof_problems.NO_STATEMENT):
        checked(recorded, tmp_path / "text.json")
    with raises(calls_problems.STATEMENT_UNREADABLE, file=tmp_path / "nowhere.json"):
        checked(recorded, tmp_path / "nowhere.json")
    attested(recorded, out)
    with raises(calls_problems.OTHER_STATEMENT, got=recorded.name, wanted="other"):
        checked(recorded, out, run_id="other")
    told = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**told, "status": "FAILED"}))
    with raises(calls_problems.NOT_FINISHED, run=run.name, got="FAILED"):
        attested(run, out)
    (run / "run.json").write_text(json.dumps(told))
    (run / "weights" / "ema.safetensors").unlink()
    with raises(proof_problems.NO_WEIGHTS, run=run.name, file=run / "weights" / "ema.safetensors"):
        attested(run, out)


def test_a_key_that_is_none_is_a_mistake_and_no_answer(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.intoto.json"
    attested(recorded, out)
    with raises(proof_problems.NO_PUBLIC_KEY, file=tmp_path / "nowhere.pem"):
        checked(recorded, out, tmp_path / "nowhere.pem")


def test_a_key_of_a_kind_that_signs_nothing_is_one_line(tmp_path: Path, keys: Keys) -> None:
    """Of a statement whose signature is asked for, it is a mistake as well, and no traceback."""
    other = Keys(tmp_path, "other", x25519.X25519PrivateKey)
    signed = signatures.signed(b"{}", keys.private)
    for call in (
        lambda: signatures.signed(b"{}", other.private),
        lambda: signatures.opened(signed, other.public),
    ):
        with raises(proof_problems.KEY_UNFIT):
            call()


@pytest.mark.parametrize("lost", [6, 12])
def test_a_run_whose_ledger_lacks_a_row_is_not_stated(run: Path, tmp_path: Path, lost: int) -> None:
    ledger = pq.read_table(run / "ledger.parquet")
    pq.write_table(ledger.filter(pc.not_equal(ledger["step"], lost)), run / "ledger.parquet")
    with raises(
        calls_problems.RECORD_CONTRADICTS, what="ledger", wanted="12 steps", got=f"one without step {lost}"
    ):
        attested(run, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("forge", "facts"),
    [
        (
            lambda run: without_digests(run, 12, "weights_digest", "optimizer_digest"),
            {
                "what": "ledger",
                "wanted": "one whose row of step 12 has digests",
                "got": "one whose row has none",
            },
        ),
        (
            lambda run: without_digests(run, 5, "ema_digest"),
            {
                "what": "ledger",
                "wanted": "one whose row of step 5 has ema_digest",
                "got": "one whose row has none",
            },
        ),
        (
            lambda run: drop(run, "evaluations.parquet", 12),
            {"what": "the last evaluation", "wanted": "after step 12", "got": "after step 10"},
        ),
        (
            lambda run: forge_result(run, metrics={"train/loss": 0.5}),
            {"what": "eval/loss of the summary", "wanted": None},
        ),
        (
            lambda run: forge_result(run, weights_digest=True),
            {"what": "weights/final.safetensors in the ledger's last row"},
        ),
        (
            lambda run: forge_result(run, step=11),
            {"what": "ledger", "wanted": "of steps 1 to 11", "got": "one with step 12"},
        ),
    ],
    ids=["digests", "average", "evaluation", "metrics", "weights", "step"],
)
def test_a_record_that_contradicts_itself_is_not_stated(
    run: Path, tmp_path: Path, forge: Callable[[Path], None], facts: dict[str, Any]
) -> None:
    out = tmp_path / "out.json"
    assert attested(run, out).steps == 12
    out.unlink()
    forge(run)
    with raises(calls_problems.RECORD_CONTRADICTS, **facts):
        attested(run, out)
    forge_result(run, weights_digest=None)
    with raises(calls_problems.SUMMARY_LACKS, got="weights_digest"):
        attested(run, out)
    assert not out.exists()


@pytest.mark.scenario
def test_weights_to_which_no_step_led_are_found_by_training_the_last_span(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a run whose ledger has no digests: nothing of the record contradicts them. The answer says whether it has seen them."""
    forged = Path(shutil.copytree(plain, tmp_path / plain.name))
    out = tmp_path / "run.intoto.json"
    attested(forged, out)
    assert checked(forged, out, share=1.0).same
    where = ("--uri", "off", "--storage", str(tmp_path), "--local")
    told = {}
    for seed in range(12):
        words = ("verify", "--statement", str(out), *where, "--seed", str(seed))
        code, said, _ = here(monkeypatch, capfd, tmp_path, *words)
        assert code == 0
        told["(9 to 12)" in said] = next(line for line in said.splitlines() if line.startswith("weights"))
        if len(told) == 2:
            break
    assert told == {
        True: "weights           as stated: the last steps lead to them",
        False: "weights           not shown: the last steps were not taken again bit for bit (--sample 1 takes all)",
    }
    forge_result(forged, weights_digest=True)
    sealed_again(forged)
    attested(forged, out)
    found = checked(forged, out, share=1.0)
    assert found.disagreement is None and found.verified is not None and not found.same
    assert found.verified.first_difference is not None
    assert found.verified.first_difference[:3] == (12, None, "weights_digest of the summary")
