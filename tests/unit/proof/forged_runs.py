"""Records that an adversary has forged who has Lockstep's source: a run, a statement of it with a good signature, and what was changed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from lockstep import train
from lockstep.calls.attestation import check_statement
from lockstep.driver.options import RunOptions
from lockstep.driver.progress import Silent
from lockstep.errors import LockstepError
from lockstep.job.identity import identity_digest
from lockstep.job.recorded_source import source_digest
from lockstep.proof import signatures
from lockstep.proof.recorded_run import recorded_run
from lockstep.proof.statement import plain, statement
from lockstep.record.events.codec import to_line
from lockstep.record.events.union import Finished, Started
from lockstep.record.ledger.journal import Journal
from lockstep.record.ledger.rows import EvaluationRow, StepRow
from lockstep.record.ledger.tables import read_evaluations, read_parquet
from lockstep.record.mirror.documents import as_json, flat
from lockstep.record.mirror.folder import run_in_folder
from lockstep.record.mirror.projection import Projection
from lockstep.record.mirror.run_files import RunFiles
from lockstep.record.mirror.seal import seal
from lockstep.record.mirror.sync import spec_of

JOB = """
import torch, torch.nn.functional as F
from torch import nn
import lockstep

{attack}

class Small(lockstep.Job):
    def model(self):
        return nn.Linear(4, 2)
    def train_data(self):
        g = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(
            torch.randn(64, 4, generator=g), torch.randint(0, 2, (64,), generator=g))
    def eval_data(self):
        return self.train_data()
    def test_data(self):
        return self.train_data()
    def loss(self, model, batch):
        total = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return lockstep.Loss(total=total, weight=len(batch[1]), parts={{"one": lockstep.Mean(total.detach(), len(batch[1]))}})
"""
MODULE = "forged_job"
RAN = "the attack ran"


def trained(folder: Path) -> Path:
    """The folder of an honest run of 8 steps."""
    (folder / f"{MODULE}.py").write_text(JOB.format(attack=""))
    document = {
        "job": {"use": f"{MODULE}:Small"},
        "length": {"steps": 8},
        "batch": {"global": 16, "micro": 8},
        "evaluate": {"every": {"steps": 4}},
        "checkpoint": {"storage": str(folder / "runs"), "every": None},
        "record": {"uri": "off", "digest_every": 1},
        "rehearsal": "off",
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        run = Path(train(document, local=True).folder)
    sys.modules.pop(MODULE, None)
    return run


def sealed_again(run: Path) -> None:
    """Have the journal and run.json of a run say what its documents and tables say, and seal all of it: what a forger does who has Lockstep."""
    summary, fields, environment, seeds = (
        json.loads((run / f"{name}.json").read_text())
        for name in ("summary", "fields", "environment", "seeds")
    )
    rows = [*read_parquet(run / "ledger.parquet"), *read_evaluations(run / "evaluations.parquet")]
    facts = {"identity": summary["identity"], "fields": fields, "environment": environment, "seeds": seeds}
    lines = []
    with closing(Journal(run, read_only=True)) as journal:
        events = [entry.event for entry in journal.read(0) if entry.event is not None]
    for event in events:
        match event:
            case StepRow() | EvaluationRow():
                continue
            case Started():
                event = Started({**event.facts, **facts})
            case Finished():
                lines += [to_line(row, run) for row in rows]
                event = replace(event, summary=summary)
        lines.append(to_line(event, run))
    (run / "journal.jsonl").write_bytes(b"".join(lines))
    put_state(run)
    seal(run)


def put_state(run: Path) -> None:
    """Write the documents and run.json as the run's spec and journal have them."""
    with closing(Journal(run, read_only=True)) as journal:
        projection = Projection(spec_of(run, "off"), run, journal)
        projection.fold(journal.events)
        state = run_in_folder(run.parent, run.name)
        end = projection.end
        assert end is not None
        RunFiles(run, journal, scaled=False).write({**projection.documents, **end.documents})
        state["params"] = {**flat(yaml.safe_load((run / "spec.yaml").read_text())), **projection.params}
        state["tags"] |= projection.tags(trouble="", figures=[], ended=True)
    (run / "run.json").write_text(as_json({**state, "status": end.status, "ended": end.at}))


class Forger:
    """A copy of a run, which may be changed, and a key to sign what is said of it."""

    def __init__(self, run: Path, folder: Path) -> None:
        self.run = Path(shutil.copytree(run, folder / "runs" / run.name))
        self.folder, self.statement = folder, folder / "run.intoto.json"
        made = ed25519.Ed25519PrivateKey.generate()
        self.private, self.public = folder / "key.pem", folder / "key.pub.pem"
        pem, public = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        self.private.write_bytes(
            made.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        self.public.write_bytes(made.public_key().public_bytes(pem, public))

    def json(self, name: str, **changes: Any) -> None:
        """Change a document of the record."""
        path = self.run / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def source(self, files: Mapping[str, str]) -> None:
        """Have the record say that these are the job's files, in every place that has to agree."""
        folder = self.run / "source"
        shutil.rmtree(folder)
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        digest = source_digest({name: text.encode() for name, text in files.items()})
        self.json("fields.json", **{"job.source": digest})
        self.identity()

    def identity(self) -> None:
        """Have the identity follow from the fields again."""
        fields = json.loads((self.run / "fields.json").read_text())
        self.json("summary.json", identity=identity_digest(fields))

    def attack(self, code: str) -> None:
        """Have the job run code as it is imported."""
        code = code.replace("RUN", repr(str(self.run))).replace("FOLDER", repr(str(self.folder)))
        self.source({f"{MODULE}.py": JOB.format(attack=f"print({RAN!r}, flush=True)\n{code}")})

    def sign(self) -> None:
        """State the record as it is, also where it contradicts itself, which `lockstep attest` would refuse. Journal and seal are made to fit."""
        sealed_again(self.run)
        run = recorded_run(self.run.name, "off", self.run.parent)
        summary = json.loads((self.run / "summary.json").read_text())
        envelope = signatures.signed(plain(statement(run, summary, self.run)), self.private)
        self.statement.write_text(json.dumps(envelope))


class Said(Silent):
    """Remembers the lines that a person would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def accepted(forger: Forger, said: Said, **more: Any) -> bool:
    """What a reviewer comes to who takes every step again, as `lockstep verify --statement` does by default."""
    options = RunOptions(local=True, progress=said)
    try:
        found = check_statement(
            forger.statement,
            key=forger.public,
            share=1.0,
            seed=1,
            uri="off",
            storage=forger.run.parent,
            options=options,
            **more,
        )
    except LockstepError as error:
        said.say(str(error))
        return False
    said.say(repr(found))
    return found.same
