"""Stating what a run is, and checking such a statement: what `lockstep attest` and `lockstep verify --statement` do, for Python."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.calls import problems
from lockstep.calls.verify import verify
from lockstep.driver.options import RunOptions
from lockstep.files import replaced
from lockstep.parsing import MOST_BYTES, json_value
from lockstep.paths import read_bounded
from lockstep.proof import signatures
from lockstep.proof.recorded_run import RecordedRun, folder_of, named_run, recorded_run
from lockstep.proof.statement import contradictions, disagreements, parsed, plain, statement
from lockstep.proof.summary_checks import DIGEST_OF, Disagreement
from lockstep.proof.verification import Verified
from lockstep.spec.locations import tracking_uri

SHARE = 0.1
"""How much of a run is trained again where nobody says."""


@dataclass(frozen=True, slots=True)
class Attested:
    """A statement that was written. `signed_by` is the id of the key, or None."""

    run_id: str
    path: str
    signed_by: str | None
    steps: int
    chain: str
    """The hash that the ledger's last segment has, which covers every row."""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Checked:
    """What a statement came to. `verified` are the spans that were trained again; None where the statement itself was wrong."""

    run_id: str
    signed_by: str | None
    signature: str
    """`good`, `bad`, `none`, or `not checked`: there is one, and no key was given."""
    disagreement: Disagreement | None
    """In what the statement is untrue: of the record, or of what was trained again. None also where its rows alone differ."""
    seed: int
    verified: Verified | None

    @property
    def same(self) -> bool:
        """Whether nothing speaks against the statement."""
        good = self.signature != "bad" and self.disagreement is None
        return good and self.verified is not None and self.verified.same

    def as_dict(self) -> dict[str, Any]:
        trained = {"steps": 0, "first_difference": None, "cause": None}
        return {
            **(trained if self.verified is None else self.verified.as_dict()),
            "run_id": self.run_id,
            "same": self.same,
            "statement": {
                "signature": self.signature,
                "signed_by": self.signed_by,
                "disagreement": None if self.disagreement is None else self.disagreement._asdict(),
                "seed": self.seed,
            },
        }


def attest(
    run_id: str,
    *,
    key: Path | None = None,
    out: Path | None = None,
    uri: str | None = None,
    storage: str | Path = "runs",
) -> Attested:
    """State what a finished run is, in the file `out`, signed with the private `key` where one is given.

    SpecError where there is no such run, it is not finished, its record contradicts itself, or the key is none. StorageError where the
    weights cannot be read, or the file cannot be written.
    """
    run, summary, folder = _finished(run_id, uri, Path(storage).absolute())
    stated = statement(run, summary, folder)
    wrong = next(contradictions(run, summary, folder), None)
    if wrong is not None:
        raise problems.RECORD_CONTRADICTS(run=run_id, what=wrong.what, wanted=wrong.stated, got=wrong.found)
    payload, signed_by = plain(stated), None
    if key is not None:
        envelope = signatures.signed(payload, key)
        payload, signed_by = json.dumps(envelope).encode() + b"\n", envelope["signatures"][0]["keyid"]
    path = out or Path(f"{run_id[:8]}.intoto.json")
    try:
        with replaced(path) as aside:
            aside.write_bytes(payload)
    except OSError as error:
        raise problems.OUT_UNWRITABLE(file=path, got=error.strerror or error) from error
    segments = stated["predicate"]["ledger"]["segments"]
    return Attested(run_id, str(path), signed_by, len(run.steps), segments[-1]["sha256"])


def check_statement(
    path: Path,
    *,
    key: Path | None = None,
    run_id: str | None = None,
    share: float | None = None,
    seed: int | None = None,
    uri: str | None = None,
    storage: str | Path = "runs",
    options: RunOptions | None = None,
    sandboxed: bool = True,
    **where: Any,
) -> Checked:
    """Check a statement: its signature by the public `key`, the record against it, and a random `share` of the run by training it again.

    The spans follow from `seed`, which is drawn where it is not given. `where` are further options of `verify`. Unless `sandboxed` is
    False the run's code is confined. SpecError where the file is no statement, there is no such run, or nothing confines a process here.
    """
    options = options or RunOptions(local=True)
    if share is not None and not 0 < share <= 1:
        raise problems.SHARE(got=f"{share:g}")
    payload, signed_by, signature = _opened(path, key)
    stated = parsed(payload)
    stated_run = str(stated["predicate"]["run"])
    if run_id not in (None, stated_run):
        raise problems.OTHER_STATEMENT(got=stated_run, wanted=run_id)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    run, summary, folder = _finished(stated_run, uri, Path(storage).absolute())
    recomputed = statement(run, summary, folder)
    wrong = next(disagreements(stated, recomputed), None) or next(contradictions(run, summary, folder), None)
    if signature == "bad" or wrong is not None:
        return Checked(stated_run, signed_by, signature, wrong, seed, None)
    options.progress.say(f"the record is as stated; spans are drawn with seed {seed}")
    again = verify(
        stated_run,
        share=share or SHARE,
        seed=seed,
        uri=uri,
        storage=storage,
        options=options,
        sandboxed=sandboxed,
        hidden=[path.absolute() for path in (path, key) if path is not None],
        **where,
    )
    return Checked(stated_run, signed_by, signature, _untrue(again), seed, again)


def _untrue(again: Verified) -> Disagreement | None:
    """A field of the stated identity that is another one where the steps were taken again, though neither the versions nor the machine are."""
    others = (cause for cause in again.fields or () if not cause.elsewhere)
    return next(
        (
            Disagreement(f"predicate.fields.{difference.field}", difference.recorded, difference.found)
            for difference in others
        ),
        None,
    )


def _opened(path: Path, key: Path | None) -> tuple[bytes, str | None, str]:
    try:
        content = read_bounded(path, MOST_BYTES)
        document = json_value(content)
    except (OSError, ValueError) as error:
        raise problems.STATEMENT_UNREADABLE(file=path, got=error) from error
    if not signatures.is_envelope(document):
        if key is not None:
            signatures.public_key(key)
        return content, None, "none" if key is None else "bad"
    payload, signed_by, good = signatures.opened(document, key)
    return payload, signed_by, "not checked" if key is None else "good" if good else "bad"


def _finished(run_id: str, uri: str | None, storage: Path) -> tuple[RecordedRun, dict[str, Any], Path]:
    """A finished run's record, its summary and its folder."""
    store = tracking_uri(uri)
    run = recorded_run(run_id, store, storage)
    stored_run = named_run(run_id, store, storage)
    if stored_run.status != "FINISHED":
        raise problems.NOT_FINISHED(run=run_id, got=stored_run.status)
    lacking = [name for name in ("identity", DIGEST_OF["final"]) if not stored_run.summary.get(name)]
    if lacking:
        raise problems.SUMMARY_LACKS(run=run_id, got=lacking[0])
    return run, stored_run.summary, folder_of(run_id, run.spec, storage)
