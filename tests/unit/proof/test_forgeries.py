"""An adversary who has the source forges a record and signs it: `verify --statement` accepts none of it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from lockstep.calls.verify import verify
from lockstep.errors import LockstepError
from lockstep.proof import signatures
from lockstep.proof.record_checks import record_disagreements
from lockstep.proof.recorded_run import recorded_run
from lockstep.record.events.codec import to_line
from lockstep.record.events.union import Warned
from lockstep.record.mirror.seal import seal
from lockstep.training.integrity.state_digest import weights_digest
from tests.unit.proof.forged_runs import JOB, MODULE, RAN, Forger, Said, accepted, trained
from tests.unit.proof.test_verify import change_ledger


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("honest"))


@pytest.fixture
def forger(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Forger:
    monkeypatch.chdir(tmp_path)
    return Forger(honest, tmp_path)


@pytest.fixture(autouse=True)
def _no_attack_hangs() -> Iterator[None]:
    """One that did would be no forgery accepted, and a night lost."""

    def late(*_: Any) -> None:
        raise AssertionError("the verification hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(240)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- the job's code ---------------------------------------------------------------------------------------------

PIPES = """
import os, stat
def pipes():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            number = int(name)
            if number > 2 and stat.S_ISFIFO(os.fstat(number).st_mode) and os.readlink(f"/proc/self/fd/{number}"):
                os.set_blocking(number, True)
                os.write(number, b"")
                found.append(number)
        except OSError:
            pass
    return found
"""

ECHO = """
import glob, json, struct
def echo(paths):
    import pyarrow.parquet as pq
    from lockstep.proof import protocol
    from lockstep.record.ledger.tables import read_parquet
    for path in paths:
        rows = read_parquet(__import__("pathlib").Path(path))
        return b"".join(protocol.line("row", row=protocol.step_document(row)) for row in rows)
"""

JUDGE = """
import sys
for name, module in list(sys.modules.items()):
    if name.startswith("lockstep."):
        for what, how in {HOW}.items():
            if hasattr(module, what):
                setattr(module, what, how)
"""

CODE: dict[str, str] = {
    "the comparison of the judge is replaced": JUDGE.replace(
        "{HOW}", "{'_differences': lambda *a: iter(()), '_checkpoint_differences': lambda *a: [], '_compare': lambda *a: None}"
    ),
    "the comparison of rows is replaced": (
        "import lockstep.proof.verification as v, lockstep.record.ledger.row_comparison as c\n"
        "v.differing = c.differing = lambda *a: iter(())\nv.Verified.same = c.same_row = property(lambda s: True)"
    ),
    "the judge's module is another one": (
        "import sys, types\nfor name in ('lockstep.proof.verification', 'lockstep.proof.statement', 'lockstep.proof.signatures'):\n"
        "    sys.modules[name] = types.ModuleType(name)"
    ),
    "numbers and digests are equal to all others": (
        "import lockstep.record.events.union as e, lockstep.record.ledger.row_comparison as c\n"
        "e.StepRow.__eq__ = e.Digests.__eq__ = lambda a, b: True\nc.Digest.__eq__ = lambda a, b: True\nc._bits = lambda v: 0"
    ),
    "json and struct are replaced": (
        "import json, struct\nold = json.dumps\njson.loads = lambda *a, **k: {'same': True}\nstruct.unpack = lambda f, b: (0.0,)"
    ),
    "the exit code is decided at the end": "import atexit, os\natexit.register(lambda: os._exit(0))",
    "answers are printed": (
        "print('{\"kind\":\"done\"}', flush=True)\nprint('same: 8 steps: every bit is equal\\nsignature  good', flush=True)"
    ),
    "a thread prints answers for ever": (
        "import threading, sys\ndef go():\n    while True:\n        sys.stdout.write('{\"kind\": \"done\"}\\n')\n"
        "threading.Thread(target=go, daemon=True).start()"
    ),
    "everything is done at once": PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"done\"}\\n')",
    "everything is done, and the process ends well": (
        PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"done\"}\\n')\nos._exit(0)"
    ),
    "the summary is told and all is done": (
        PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"summary\",\"summary\":{\"same\":true}}\\n{\"kind\":\"done\"}\\n')\nos._exit(0)"
    ),
    "the verdict is told": PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"verdict\",\"same\":true}\\n')",
    "noise is written into each pipe": PIPES + "for p in pipes(): os.write(p, os.urandom(4000) + b'\\n')",
    "a line never ends": (
        PIPES + "import threading\ndef go(p):\n    while True: os.write(p, b'x' * 65536)\n"
        "for p in pipes(): threading.Thread(target=go, args=(p,), daemon=True).start()"
    ),
    "rows never end": (
        PIPES + "import json\nhexed='3fe0000000000000'\nn=0\n"
        "row=dict(step=1,epoch=0,samples=16,attempt=1,skipped=False,parts={},digests=None,**{k:hexed for k in "
        "('loss','weight','lr','grad_norm','clipped_norm','scale','data_wait_s','step_s','wall_clock')})\n"
        "while pipes():\n    n+=1\n    row['step']=n\n    for p in pipes(): os.write(p, json.dumps({'kind':'row','row':row}).encode()+b'\\n')"
    ),
    "lines to show never end": (
        PIPES + "while pipes():\n    for p in pipes(): os.write(p, b'{\"kind\":\"said\",\"text\":\"same\"}\\n')"
    ),
    "a message is nested without end": PIPES + "for p in pipes(): os.write(p, b'{\"kind\":' + b'[' * 60000 + b'\\n')",
    "a number has a million digits": PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"row\",\"row\":' + b'9' * 60000 + b'}\\n')",
    "a row has other types": PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"row\",\"row\":{\"step\":\"1\",\"loss\":null}}\\n')",
    "a file leads elsewhere": (
        PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"file\",\"name\":\"../../../../../../tmp/forged\",\"size\":4}\\nevil')"
    ),
    "a file is the weights of the record": (
        PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"file\",\"name\":\"final.safetensors\",\"size\":4}\\nevil')"
    ),
    "a file has no end": (
        PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"file\",\"name\":\"final.safetensors\",\"size\":9223372036854775807}\\n')"
    ),
    "an error is the end of the interpreter": (
        PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"error\",\"error\":\"SystemExit\",\"text\":\"0\"}\\n')"
    ),
    "an error has a message of the terminal": (
        PIPES + "for p in pipes(): os.write(p, b'{\"kind\":\"error\",\"error\":\"JobError\",\"text\":\"\\\\u001b]0;same\\\\u0007\"}\\n')"
    ),
    "a pickle is sent": (
        PIPES + "import pickle\nclass P:\n    def __reduce__(self): return os.system, ('touch ' + FOLDER + '/pickled',)\n"
        "for p in pipes(): os.write(p, pickle.dumps(P()) + b'\\n')"
    ),
    "the rows of the record are sent": (
        PIPES + ECHO + "told = echo([RUN + '/ledger.parquet'])\nfor p in pipes(): os.write(p, told + b'{\"kind\":\"done\"}\\n')\nos._exit(0)"
    ),
    "the rows of any record nearby are sent": (
        PIPES + ECHO + "told = echo(glob.glob(FOLDER + '/**/ledger.parquet', recursive=True))\n"
        "for p in pipes(): os.write(p, told + b'{\"kind\":\"done\"}\\n')\nos._exit(0)"
    ),
    "each row is mended from the record": (
        ECHO + "import pathlib\nfrom lockstep.record.ledger.tables import read_parquet\nfrom lockstep.proof import protocol\n"
        "old = protocol.step_document\nrows = {r.step: r for r in read_parquet(pathlib.Path(RUN + '/ledger.parquet'))}\n"
        "protocol.step_document = lambda row: old(rows[row.step])"
    ),
    "the statement is read for its digests": (
        "import pathlib\nassert pathlib.Path(FOLDER + '/run.intoto.json').read_text()[:1] == '{'"
    ),
    "the record is put back as it should be": (
        "import os, shutil\nshutil.rmtree(RUN)\nos.makedirs(RUN)"
    ),
    "another Lockstep is written over this one": (
        "import lockstep, pathlib\npathlib.Path(lockstep.__file__).with_name('forged.py').write_text('')"
    ),
    "a .pth and a sitecustomize wait for the next start": (
        "import sysconfig, pathlib\nfor name in ('forged.pth', 'sitecustomize.py'):\n"
        "    pathlib.Path(sysconfig.get_path('purelib'), name).write_text('import os; os._exit(0)')"
    ),
    "the judge's memory is written": (
        "import os\nfor pid in ('1', str(os.getppid())):\n    open(f'/proc/{pid}/mem', 'r+b').write(b'x')"
    ),
    "the judge is killed": (
        "import os, signal\nfor pid in range(2, 70000):\n    if pid != os.getpid():\n"
        "        try: os.kill(pid, signal.SIGKILL)\n        except OSError: pass"
    ),
    "the verdict is fetched from the network": (
        "import socket\nsocket.create_connection(('127.0.0.1', 1), 2)\n"
    ),
    "the process ends well at once": "import os\nos._exit(0)",
    "the script exits": "import sys\nsys.exit(0)",
    "a child holds the pipe open": "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nos._exit(0)",
    "the process becomes another one": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "nothing is told": (
        "import gc\nfrom lockstep.calls.executor import Executed\nExecuted.row = lambda self, found: None"
    ),
    "everything that is printed floods": "print('x' * 3_000_000)\nfor i in range(3000): print('\\x1b]52;c;c2FtZQ==\\x07' * 20)",
    "the environment is changed": (
        "import os\nos.environ.update(PYTHONPATH=FOLDER, LD_PRELOAD=FOLDER, LOCKSTEP_SANDBOX='off')"
    ),
}  # fmt: skip

DEFAULT = {
    "the comparison of the judge is replaced",
    "the rows of the record are sent",
}
"""Those of every `make test`; the others are scenarios."""

HARMLESS = {"the environment is changed"}


@pytest.mark.every(16)
@pytest.mark.thinned(15)
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.scenario], id=name.replace(" ", "-"))
        for name in CODE
    ],
)
def test_no_code_of_the_job_has_a_forged_loss_accepted(forger: Forger, attack: str) -> None:
    """It is executed, and it is in vain: the loss of one step is not the one that the job computes."""
    forger.attack(CODE[attack])
    change_ledger(forger.run, 5, "loss", lambda value: value / 2)
    forger.sign()
    said = Said()
    assert not accepted(forger, said)
    text = "\n".join(said.lines)
    assert RAN in text
    assert "\x1b" not in text and "\x07" not in text
    assert len(text) < 3 << 20
    assert not (forger.folder / "pickled").exists()
    assert (forger.run / "ledger.parquet").exists()


@pytest.mark.scenario
def test_the_same_record_is_accepted_with_nothing_forged_and_told_where_it_is(forger: Forger) -> None:
    """The control: neither the sandbox nor a source that was never trained so is what refuses the others."""
    forger.attack("pass")
    forger.sign()
    said = Said()
    assert accepted(forger, said), said.lines
    change_ledger(forger.run, 5, "loss", lambda value: value / 2)
    forger.sign()
    said = Said()
    assert not accepted(forger, said)
    assert "step=5, micro_batch=None, quantity='loss'" in said.lines[-1]


@pytest.mark.scenario
def test_a_job_that_carries_its_answers_is_accepted_as_the_page_says(forger: Forger) -> None:
    """What no judge can see who has the job's word alone; it stands in the source, whose sha256 is stated."""
    forger.attack(
        "from lockstep.proof import protocol\nold = protocol.step_document\n"
        "protocol.step_document = lambda row: old(row._replace(loss=row.loss / 2) if row.step == 5 else row)"
    )
    change_ledger(forger.run, 5, "loss", lambda value: value / 2)
    forger.sign()
    assert accepted(forger, Said())


@pytest.mark.scenario
def test_outside_a_sandbox_a_job_can_read_its_answers_as_the_page_says(forger: Forger) -> None:
    """It states what reading them imports, too."""
    forger.attack(CODE["each row is mended from the record"])
    field("distribution.pyarrow", version("pyarrow"))(forger)
    change_ledger(forger.run, 5, "loss", lambda value: value / 2)
    forger.sign()
    said = Said()
    assert accepted(forger, said, sandboxed=False), said.lines


# --- files of the source ----------------------------------------------------------------------------------------

PATCH = "import builtins\nbuiltins.FORGED = True\n"
SHADOWS = {
    "lockstep": {"lockstep/__init__.py": PATCH, "lockstep/proof/__init__.py": "", "lockstep/proof/verification.py": PATCH},
    "lockstep module": {"lockstep/record/ledger/row_comparison.py": "def differing(*a): return iter(())\n" + PATCH},
    "json": {"json.py": PATCH + "def loads(*a, **k): return {}\n"},
    "struct": {"struct.py": PATCH},
    "colorsys, which nobody has imported yet": {"colorsys.py": PATCH},
    "a folder": {"hashlib/__init__.py": PATCH},
}  # fmt: skip


@pytest.mark.scenario
@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    "shadow",
    [
        pytest.param(name, marks=[pytest.mark.scenario] if i else [], id=name)
        for i, name in enumerate(SHADOWS)
    ],
)
def test_a_recorded_source_stands_in_for_no_module_of_lockstep_or_python(forger: Forger, shadow: str) -> None:
    """It is not imported, the job's own module is, and the forged loss is found."""
    look = f"import builtins, colorsys\nprint({RAN!r}, hasattr(builtins, 'FORGED'), flush=True)"
    forger.source({f"{MODULE}.py": JOB.format(attack=look), **SHADOWS[shadow]})
    change_ledger(forger.run, 5, "loss", lambda value: value / 2)
    forger.sign()
    said = Said()
    assert not accepted(forger, said)
    assert f"job: {RAN} False" in said.lines
    assert any(
        line.startswith(f"the recorded {next(iter(SHADOWS[shadow]))} is not imported") for line in said.lines
    )
    assert "step=5, micro_batch=None, quantity='loss'" in said.lines[-1]


# --- the record -------------------------------------------------------------------------------------------------


def column(name: str, change: Callable[[Any], Any], step: int = 5) -> Callable[[Forger], None]:
    return lambda forger: change_ledger(forger.run, step, name, change)


def rows(change: Callable[[pa.Table], pa.Table], name: str = "ledger.parquet") -> Callable[[Forger], None]:
    def forge(forger: Forger) -> None:
        path = forger.run / name
        pq.write_table(change(pq.read_table(path)), path)

    return forge


def weights(forger: Forger) -> None:
    """Other weights in every place: the file, the summary, and the ledger's last row."""
    import torch

    from lockstep.training.integrity.digests import Digester, model_digest

    path = forger.run / "weights" / "final.safetensors"
    state = load_file(path)
    state["bias"][0] += 0.5
    save_file(state, path)
    forger.json("summary.json", weights_digest=weights_digest(state))
    digest = model_digest(Digester(torch.device("cpu")), state)
    change_ledger(forger.run, 8, "weights_digest", lambda _: digest)


def added_weights(forger: Forger) -> None:
    path = forger.run / "weights" / "final.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path.with_stem("ema"))


def linked_weights(forger: Forger) -> None:
    weights(forger)
    path = forger.run / "weights" / "final.safetensors"
    path.rename(forger.folder / "elsewhere.safetensors")
    path.symlink_to(forger.folder / "elsewhere.safetensors")


def linked_source(forger: Forger) -> None:
    change_ledger(forger.run, 5, "loss", lambda value: value / 2)
    path = forger.run / "source" / f"{MODULE}.py"
    path.rename(forger.folder / "job.py")
    path.symlink_to(forger.folder / "job.py")


def metrics(forger: Forger) -> None:
    summary = json.loads((forger.run / "summary.json").read_text())
    forger.json("summary.json", metrics={**summary["metrics"], "eval/loss": 0.001})
    rows(lambda table: replaced(table, "eval/loss", 0.001), "evaluations.parquet")(forger)


def replaced(table: pa.Table, name: str, value: float) -> pa.Table:
    values = [*table[name].to_pylist()[:-1], value]
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def field(name: str, value: Any) -> Callable[[Forger], None]:
    def forge(forger: Forger) -> None:
        forger.json("fields.json", **{name: value})
        forger.identity()

    return forge


def spec(old: str, new: str) -> Callable[[Forger], None]:
    def forge(forger: Forger) -> None:
        path = forger.run / "spec.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return forge


RECORDS: dict[str, Callable[[Forger], None]] = {
    "a gradient's norm": column("grad_norm", lambda value: value * 2),
    "a rate": column("lr", lambda value: value * 2),
    "a weight": column("weight", lambda value: value + 1),
    "a part": column("part/one", lambda value: value / 2),
    "the first loss": column("loss", lambda value: value / 2, 1),
    "the last loss": column("loss", lambda value: value / 2, 8),
    "a digest of weights": column("weights_digest", lambda value: value ^ 1),
    "a digest of the optimizer": column("optimizer_digest", lambda value: value ^ 1),
    "a digest of a gradient": column("gradient_digests", lambda value: [value[0] ^ 1, value[1]]),
    "the last bit of a loss": column("loss", lambda value: value * (1 + 2**-52)),
    "a loss that is none": column("loss", lambda value: float("nan")),
    "a lost row": rows(lambda table: table.filter(pa.array([i != 4 for i in range(len(table))]))),
    "a row too much": rows(lambda table: pa.concat_tables([table, table.slice(7)])),
    "an end cut off": rows(lambda table: table.slice(0, 6)),
    "an evaluation": metrics,
    "a metric of the test": lambda forger: forger.json("summary.json", test={"test/loss": 0.001, "test/one": 0.001}),
    "weights in every place": weights,
    "weights behind a link": linked_weights,
    "weights that no digest covers": added_weights,
    "another identity": lambda forger: forger.json("summary.json", identity="0" * 64),
    "a source behind a link": linked_source,
    "fewer samples": field("data.train_samples", 63),
    "another fingerprint": field("data.train_fingerprint", "0" * 64),
    "another seed in the spec": spec("seed: 0", "seed: 1"),
}  # fmt: skip


def line_of_journal(forger: Forger) -> None:
    """Another line that is whole, as its checksum says."""
    path = forger.run / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    warned = to_line(Warned("nothing was out of the ordinary"), forger.run)
    path.write_bytes(b"".join([lines[0], warned, *lines[1:]]))


ALONE: dict[str, Callable[[Forger], None]] = {
    "the workers of the summary": lambda forger: forger.json("summary.json", workers=64),
    "a summary of a run that was stopped": lambda forger: forger.json("summary.json", stopped=True),
    "a column of the observations": rows(
        lambda table: table.append_column("layers/0/gradient_norm", pa.array([0.5] * len(table))), "observations.parquet"
    ),
    "another model's seed": lambda forger: forger.json("seeds.json", model="1"),
    "another machine": lambda forger: forger.json("environment.json", hostname="elsewhere"),
    "a line of the journal": line_of_journal,
}  # fmt: skip
"""Values that no step computes."""


@pytest.mark.parametrize("kind", list(ALONE))
def test_a_value_that_no_step_computes_is_found_in_the_record_alone(
    forger: Forger, tmp_path: Path, kind: str
) -> None:
    def wrong() -> Any:
        run = recorded_run(forger.run.name, "off", forger.run.parent)
        return next(record_disagreements(run, tmp_path), None)

    assert wrong() is None
    ALONE[kind](forger)
    assert wrong() is not None


@pytest.mark.scenario
@pytest.mark.parametrize("kind", list(ALONE))
def test_what_no_step_computes_is_not_changed_alone(forger: Forger, kind: str) -> None:
    """Neither in a record that nobody has stated, nor after it was stated; the control is verified."""
    forger.sign()
    stated = forger.statement.read_bytes()
    found = verify(forger.run.name, all_steps=True, uri="off", storage=forger.run.parent, local=True)
    assert found.same and found.told, found
    ALONE[kind](forger)
    found = verify(forger.run.name, all_steps=True, uri="off", storage=forger.run.parent, local=True)
    assert not found.same
    assert found.cause == "the record was changed after it was written: all steps are equal"
    seal(forger.run)
    forger.statement.write_bytes(stated)
    said = Said()
    assert not accepted(forger, said)
    assert "predicate.files" in said.lines[-1]


@pytest.mark.thinned(11)
@pytest.mark.scenario
@pytest.mark.parametrize("kind", list(RECORDS))
def test_no_forged_record_is_accepted(forger: Forger, kind: str) -> None:
    RECORDS[kind](forger)
    try:
        forger.sign()
    except LockstepError:  # a record that cannot even be stated is stated by nobody
        return
    assert not accepted(forger, Said())


# --- statement and signature ------------------------------------------------------------------------------------

Envelope = dict[str, Any]


def payload(change: Callable[[dict[str, Any]], None]) -> Callable[[Forger, Envelope], Envelope]:
    def forge(_forger: Forger, envelope: Envelope) -> Envelope:
        stated = json.loads(base64.b64decode(envelope["payload"]))
        change(stated)
        return {**envelope, "payload": base64.b64encode(json.dumps(stated).encode()).decode()}

    return forge


def others_key(forger: Forger, envelope: Envelope) -> Envelope:
    """Signed by a stranger, under the name of the key that is expected."""
    other = Forger(forger.run, forger.folder / "other")
    signed = signatures.signed(base64.b64decode(envelope["payload"]), other.private)
    signed["signatures"][0]["keyid"] = envelope["signatures"][0]["keyid"]
    return signed


def of_another_run(forger: Forger, envelope: Envelope) -> Envelope:
    """A good signature, of something else."""
    other = signatures.signed(b'{"_type": "other"}', forger.private)
    return {**envelope, "signatures": other["signatures"]}


STATEMENTS: dict[str, Callable[[Forger, Envelope], Any]] = {
    "other weights": payload(lambda stated: stated["predicate"]["weights"].update(final="0" * 64)),
    "fewer steps": payload(lambda stated: stated["predicate"]["ledger"].update(steps=4)),
    "another subject": payload(lambda stated: stated["subject"].pop()),
    "another run": payload(lambda stated: stated["predicate"].update(run="../" + stated["predicate"]["run"])),
    "no signature": lambda forger, envelope: {**envelope, "signatures": []},
    "an empty signature": lambda forger, envelope: {
        **envelope, "signatures": [{**envelope["signatures"][0], "sig": ""}],
    },
    "no envelope": lambda forger, envelope: json.loads(base64.b64decode(envelope["payload"])),
    "another type": lambda forger, envelope: {**envelope, "payloadType": "text/plain"},
    "a stranger's key": others_key,
    "the signature of something else": of_another_run,
    "a list": lambda forger, envelope: [envelope],
}  # fmt: skip


@pytest.mark.parametrize("kind", list(STATEMENTS))
def test_no_forged_statement_is_accepted(forger: Forger, kind: str) -> None:
    """None of them has anything trained: this is found before."""
    forger.sign()
    forged = STATEMENTS[kind](forger, json.loads(forger.statement.read_text()))
    forger.statement.write_text(json.dumps(forged))
    said = Said()
    assert not accepted(forger, said)
    assert not any("taken again" in line for line in said.lines)


@pytest.mark.scenario
def test_at_least_forty_forgeries_are_tried() -> None:
    assert len(CODE) + len(SHADOWS) + len(RECORDS) + len(STATEMENTS) >= 80


# --- the judge --------------------------------------------------------------------------------------------------


@pytest.mark.scenario
def test_the_judging_process_never_imports_the_job(forger: Forger) -> None:
    """Whatever is in the working directory: neither its files nor the recorded ones."""
    for name in ("securesystemslib", "cryptography", "pyarrow", "sitecustomize", "usercustomize", "rich"):
        Path(f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    forger.attack("import os\nprint('process', os.getpid(), os.environ.get('A_TOKEN'), flush=True)")
    forger.sign()
    said = Said()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("A_TOKEN", "x9Jd72kQpLz0vB4n")
        assert accepted(forger, said), said.lines
    (line,) = [line for line in said.lines if line.startswith("job: process")]
    assert line != f"job: process {os.getpid()} None" and line.endswith("None")
    shutil.rmtree(forger.folder)
