"""A recorded run is taken again: what was planted is found where it was planted, and nothing where nothing was."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file, save_file

from lockstep import train
from lockstep.calls import problems as calls_problems
from lockstep.calls.attestation import attest
from lockstep.calls.diff import diff
from lockstep.calls.replay_call import replay
from lockstep.calls.verify import verify
from lockstep.checkpoint.manifest import FileEntry, Manifest
from lockstep.data.sampler import MicroBatchSampler
from lockstep.errors import Problem
from lockstep.job.identity import VARIABLE, identity_digest
from lockstep.plan import Plan
from lockstep.proof import problems
from lockstep.proof.record_checks import _of_fork, told_of
from lockstep.proof.recorded_run import recorded_run
from lockstep.proof.verification import Verified, _result_differences
from lockstep.record.mirror.seal import seal
from lockstep.spec.fields import Fork
from lockstep.training import run_facts
from lockstep.training.auxiliary_state import save_beside
from lockstep.training.integrity.state_digest import weights_digest
from tests.in_process import here
from tests.raised import raises
from tests.unit.proof import verified_jobs
from tests.unit.proof.forged_runs import sealed_again
from tests.unit.proof.verified_jobs import PLANTED

STEPS, GLOBAL, MICRO, SAMPLES = 12, 12, 3, 56
SEED = 3


def document(storage: Path, **changes: Any) -> dict[str, Any]:
    return {
        "job": {"use": "tests.unit.proof.verified_jobs:Small"},
        "seed": SEED,
        "length": {"steps": STEPS},
        "batch": {"global": GLOBAL, "micro": MICRO},
        "data": {"drop_last": False},
        "evaluate": {"every": {"steps": 5}},
        "checkpoint": {"storage": str(storage), "every": {"steps": 4}, "keep_last": 9},
        "record": {"uri": "off", "digest_every": 1},
        **changes,
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 12 steps, with checkpoints after 4, 8 and 12."""
    return Path(train(document(tmp_path_factory.mktemp("recorded")), local=True).folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a run whose ledger has no digests."""
    record = {"uri": "off", "digest_every": None}
    return Path(train(document(tmp_path_factory.mktemp("plain"), record=record), local=True).folder)


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it, to plant something in."""
    return Path(shutil.copytree(recorded, tmp_path / recorded.name))


@pytest.fixture(autouse=True)
def nothing_planted() -> Iterator[None]:
    PLANTED.clear()
    yield
    PLANTED.clear()


def verified(run: Path, **options: Any) -> Verified:
    return verify(run.name, uri="off", storage=run.parent, **{"local": True, **options})


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def first(found: Verified) -> tuple[int, int | None, str]:
    assert not found.same
    assert found.first_difference is not None
    return found.first_difference[:3]


# --- nothing planted --------------------------------------------------------------------------------------------


@pytest.mark.every(6)
@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("options", "spans"),
    [
        ({}, [(1, 12)]),
        ({"all_steps": True}, [(1, 12)]),
        ({"from_step": 6, "steps": 2}, [(5, 7)]),
        ({"from_step": 9}, [(9, 12)]),
        ({"steps": 1}, [(9, 12)]),
        ({"share": 1.0}, [(1, 4), (5, 8), (9, 12)]),
    ],
)
def test_an_honest_run_is_the_same_in_every_span_and_nothing_of_it_is_touched(
    recorded: Path, options: dict[str, Any], spans: list[tuple[int, int]]
) -> None:
    before = contents(recorded.parent)
    found = verified(recorded, **options)
    assert found.same and found.same_bits and found.cause is None
    assert [(one.start + 1, one.until) for one in found.spans] == spans
    assert found.steps == sum(last - first + 1 for first, last in spans)
    assert contents(recorded.parent) == before


@pytest.mark.scenario
def test_a_run_without_digests_is_compared_by_its_columns(tmp_path: Path) -> None:
    run = Path(train(document(tmp_path, record={"uri": "off", "digest_every": None}), local=True).folder)
    assert verified(run).same
    PLANTED["order"] = True
    step, micro_batch, quantity = first(verified(run, all_steps=True))
    assert (step, micro_batch) == (1, None)
    assert quantity in ("loss", "grad_norm")


# --- in the record ----------------------------------------------------------------------------------------------


def flip(run: Path, step: int, section: str, tensor: str = "", *, signed: bool = True) -> None:
    """Flip one bit in the last tensor of a checkpoint's section whose name ends so, and have its manifest say so where `signed`."""
    folder = next(path for path in run.iterdir() if path.is_dir() and path.name.endswith(f"{step:08d}"))
    (name,) = (path for path in folder.iterdir() if path.name.startswith("manifest"))
    manifest = Manifest.decode(name.read_bytes())
    entry = next(one for one in manifest.files if (one.section, one.kind) == (section, "tensors"))
    data = bytearray((folder / entry.name).read_bytes())
    header = int.from_bytes(data[:8], "little")
    contents = json.loads(data[8 : 8 + header])
    end = max(value["data_offsets"][1] for name, value in contents.items() if name.endswith(tensor))
    data[8 + header + end - 2] ^= 1
    (folder / entry.name).write_bytes(data)
    if signed:
        changed = FileEntry(**{**vars_of(entry), "sha256": hashlib.sha256(data).hexdigest()})
        files = tuple(changed if one == entry else one for one in manifest.files)
        name.write_bytes(replace(manifest, files=files).encode())


def vars_of(entry: FileEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__dataclass_fields__}


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("section", "quantity"), [("model", "weights_digest"), ("optimizer", "optimizer_digest")]
)
def test_a_flipped_bit_in_a_checkpoint_is_found(run: Path, section: str, quantity: str) -> None:
    """With the hashes of its files made to fit: where it is started from, and where a longer span passes it."""
    flip(run, 8, section)
    found = verified(run, from_step=9, steps=1)
    assert first(found) == (8, None, quantity)
    assert found.cause == "the checkpoint was changed after it was saved"
    step, _, passed = first(verified(run, all_steps=True))
    assert (step, passed) == (8, f"{quantity} of the checkpoint")
    assert verified(run, from_step=5, steps=3).same


@pytest.mark.scenario
def test_of_several_differences_the_first_step_is_named(run: Path) -> None:
    """Whichever of the record's parts it is in: the checkpoints of a span are looked at after its rows."""
    change_ledger(run, 11, "loss", lambda value: value * 2)
    flip(run, 4, "model")
    assert first(verified(run, all_steps=True)) == (4, None, "weights_digest of the checkpoint")
    assert first(verified(run, from_step=9)) == (11, None, "loss")


def test_a_damaged_checkpoint_is_found(run: Path) -> None:
    flip(run, 4, "model", signed=False)
    assert first(verified(run, from_step=5, steps=1)) == (4, None, "checkpoint")


def change_ledger(run: Path, step: int, column: str, change: Callable[[Any], Any]) -> None:
    table = pq.read_table(run / "ledger.parquet")
    values = table[column].to_pylist()
    values[step - 1] = change(values[step - 1])
    at = table.column_names.index(column)
    changed = table.set_column(at, column, pa.array(values, table.schema.field(column).type))
    pq.write_table(changed, run / "ledger.parquet")


@pytest.mark.scenario
@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("column", "change", "micro_batch", "quantity"),
    [
        ("loss", lambda value: value * (1 + 2**-52), None, "loss"),
        ("lr", lambda value: value * 2, None, "lr"),
        ("grad_norm", lambda value: -value, None, "grad_norm"),
        ("part/one", lambda value: 0.0, None, "one"),
        ("samples", lambda value: value + 1, None, "samples"),
        ("weights_digest", lambda value: value ^ 1, None, "weights_digest"),
        ("optimizer_digest", lambda value: value ^ 2**63, None, "optimizer_digest"),
        ("gradient_digests", lambda value: [*value[:2], value[2] ^ 1, *value[3:]], 2, "gradient_digest"),
    ],
)
def test_a_changed_value_of_the_ledger_is_found(
    run: Path, column: str, change: Callable[[Any], Any], micro_batch: int | None, quantity: str
) -> None:
    change_ledger(run, 7, column, change)
    found = verified(run, from_step=6)
    assert first(found) == (7, micro_batch, quantity)
    assert found.cause == "this one value was changed after it was recorded: all else is equal"


@pytest.mark.scenario
def test_a_changed_evaluation_and_a_lost_row_are_found(run: Path) -> None:
    table = pq.read_table(run / "evaluations.parquet")
    at = table.column_names.index("eval/loss")
    losses = [value * 2 if i == 1 else value for i, value in enumerate(table["eval/loss"].to_pylist())]
    pq.write_table(table.set_column(at, "eval/loss", pa.array(losses)), run / "evaluations.parquet")
    assert first(verified(run)) == (10, None, "eval/loss")
    ledger = pq.read_table(run / "ledger.parquet")
    pq.write_table(ledger.filter(pa.compute.not_equal(ledger["step"], 6)), run / "ledger.parquet")
    assert first(verified(run)) == (6, None, "row")


def drop(run: Path, name: str, *steps: int) -> None:
    """Take rows out of a file of the record."""
    table = pq.read_table(run / name)
    lost = pa.array([step in steps for step in table["step"].to_pylist()])
    pq.write_table(table.filter(pa.compute.invert(lost)), run / name)


@pytest.mark.scenario
def test_a_lost_last_evaluation_of_a_finished_run_is_found(run: Path) -> None:
    assert verified(run).same
    drop(run, "evaluations.parquet", 12)
    found = verified(run)
    assert first(found) == (12, None, "evaluation")
    assert found.cause == "the record lacks it, or has it too much: all else is equal"
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**state, "status": "FAILED"}))
    assert verified(run).same, "a run that has not finished may have been ended before it"


@pytest.mark.scenario
def test_rows_that_the_run_cannot_have_and_rows_that_are_there_twice_are_found(run: Path) -> None:
    for name, kind in {"evaluations.parquet": "evaluation", "ledger.parquet": "row"}.items():
        table = pq.read_table(run / name)
        more = table.slice(table.num_rows - 1).to_pylist()[0]
        for step, there in ((13, (13, None, kind)), (0, (0, None, kind)), (12, None)):
            row = pa.Table.from_pylist([{**more, "step": step}], schema=table.schema)
            pq.write_table(pa.concat_tables([row, table]), run / name)
            if there is not None:
                assert first(verified(run, all_steps=True)) == there
                continue
            with raises(problems.ROW_TWICE, run=run.name, kind=kind, step=12):
                verified(run)
        pq.write_table(table, run / name)
    seal(run)
    assert verified(run, all_steps=True).same


def without_digests(run: Path, step: int, *columns: str) -> None:
    for column in columns:
        change_ledger(run, step, column, lambda value: None)


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("columns", "quantity"),
    [
        (("weights_digest", "optimizer_digest", "gradient_digests"), "digests"),
        (("gradient_digests",), "gradient_digests"),
    ],
)
def test_a_row_without_the_digests_that_it_must_have_is_found(
    run: Path, columns: tuple[str, ...], quantity: str
) -> None:
    without_digests(run, 7, *columns)
    assert first(verified(run, from_step=6)) == (7, None, quantity)
    ledger = pq.read_table(run / "ledger.parquet")
    attempts = pa.array([1 if step < 8 else 2 for step in ledger["step"].to_pylist()])
    at = ledger.column_names.index("attempt")
    pq.write_table(ledger.set_column(at, "attempt", attempts), run / "ledger.parquet")
    sealed_again(run)
    assert verified(run, from_step=6).same, "an attempt before may have taken them less often"


def forge_result(run: Path, **changes: Any) -> None:
    """Have the summary say so, and the file of the final weights if these are changed."""
    summary = json.loads((run / "summary.json").read_text())
    if changes.get("weights_digest"):
        path = run / "weights" / "final.safetensors"
        state = {name: value + 1 for name, value in load_file(path).items()}
        save_file(state, path)
        changes["weights_digest"] = weights_digest(state)
    (run / "summary.json").write_text(json.dumps({**summary, **changes}))


@pytest.mark.scenario
@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("changes", "quantity"),
    [
        ({"weights_digest": True}, "weights_digest of the summary"),
        ({"metrics": {"train/loss": 0.5}}, "eval/loss of the summary"),
        ({"samples": 1}, "samples of the summary"),
    ],
)
@pytest.mark.parametrize("digest_every", [None, 1])
def test_a_result_to_which_the_steps_do_not_lead_is_found(
    run: Path, plain: Path, tmp_path: Path, digest_every: int | None, changes: dict[str, Any], quantity: str
) -> None:
    """Also where the ledger has no digest of it, and whichever span reaches the end."""
    forged = run if digest_every else Path(shutil.copytree(plain, tmp_path / plain.name))
    sound = verified(forged)
    assert sound.same and sound.weights
    forge_result(forged, **changes)
    found = verified(forged, steps=1)
    assert first(found) == (12, None, quantity)
    assert found.cause == "the weights or the summary were changed after they were written: all else is equal"
    sealed_again(forged)
    before = verified(forged, from_step=1, steps=8)
    assert before.same and not before.weights


@pytest.mark.scenario
def test_another_file_of_weights_than_the_summary_says_is_found(run: Path) -> None:
    path = run / "weights" / "final.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path)
    assert first(verified(run)) == (12, None, "weights/final.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    assert first(verified(run)) == (12, None, "weights/final.safetensors")


def stated_identity(run: Path) -> None:
    forge_result(run, identity="0" * 64)


def added_weights(run: Path) -> None:
    """The best ones of a run that kept none: an export would take them for its own."""
    path = run / "weights" / "final.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path.with_stem("best"))


def weights_behind_another_run(run: Path) -> None:
    """The summary points to a run that has the weights, and this folder has others."""
    shutil.copytree(run, run.with_name("f" * 32))
    forge_result(run, reused_from="f" * 32)
    path = run / "weights" / "final.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path)


def added_beside(run: Path) -> None:
    save_beside(run / "weights" / "final.safetensors", {"job": {"scale": 2.0}})


@pytest.mark.parametrize(
    ("forge", "quantity"),
    [
        (stated_identity, "identity of the summary"),
        (added_weights, "weights/best.safetensors"),
        (weights_behind_another_run, "weights/final.safetensors"),
        (added_beside, "weights/final.beside.safetensors"),
    ],
)
def test_what_no_digest_of_the_record_covers_is_found(
    run: Path, forge: Callable[[Path], None], quantity: str
) -> None:
    """No step shows it; whoever reads the folder would take it for the run's."""
    forge(run)
    found = verified(run, steps=1)
    assert first(found) == (12, None, quantity)
    assert found.cause == "the weights or the summary were changed after they were written: all else is equal"


def test_a_summary_that_says_nothing_of_what_is_beside_the_weights_is_found(recorded: Path) -> None:
    """The replayed steps have a digest of it."""
    run = recorded_run(recorded.name, "off", recorded.parent)
    replayed = {**run.summary, "beside": {"final": "1" * 64}}
    stripped = replace(run, summary={**run.summary, "beside": {}})
    sound = replace(run, summary=replayed)
    assert list(_result_differences(sound, replayed, [])) == []
    (found,) = _result_differences(stripped, replayed, [recorded])
    assert found[2:] == ("beside_digest.final of the summary", None, "1" * 64)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("field", "value", "where", "cause"),
    [
        ("seed", 4, (1, 0, "gradient_digest"), "seed was 3 and is 4"),
        (
            "data",
            {"drop_last": False, "shuffle": "none"},
            (1, 0, "gradient_digest"),
            "data.shuffle was 'full'",
        ),
        ("schedule", {"name": "step", "every": 6}, (7, None, "lr"), "schedule.name was 'constant'"),
        ("clip_norm", 0.5, (1, None, "clipped_norm"), "clip_norm was None and is 0.5"),
    ],
)
def test_a_changed_spec_is_found_with_its_field(
    run: Path, field: str, value: Any, where: tuple[int, int | None, str], cause: str
) -> None:
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    (run / "spec.yaml").write_text(yaml.safe_dump({**spec, field: value}))
    found = verified(run, all_steps=True)
    assert first(found) == where
    assert cause in (found.cause or "")


# --- in what is taken again -------------------------------------------------------------------------------------


@pytest.mark.scenario
def test_one_changed_sample_is_found_in_its_step_and_micro_batch(recorded: Path) -> None:
    plan = Plan.of(SAMPLES, GLOBAL, MICRO, drop_last=False, steps=STEPS)
    order = list(
        MicroBatchSampler(
            verified_jobs.Points(SAMPLES), plan, range(4), seed=SEED, shuffle="full", window=8, start=0
        )
    )
    for sample in (0, 17, 43):
        PLANTED["sample"] = sample
        use = next(batch for batch in order if sample in batch.ids)
        found = verified(recorded, all_steps=True)
        assert first(found) == (use.step + 1, use.micro_batch, "gradient_digest")


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize(("step", "micro_batch"), [(0, 0), (4, 1), (6, 3), (11, 2)])
def test_a_flipped_bit_of_a_gradient_is_found(recorded: Path, step: int, micro_batch: int) -> None:
    PLANTED["gradient"] = (step, micro_batch)
    assert first(verified(recorded, all_steps=True)) == (step + 1, micro_batch, "gradient_digest")
    near = verified(recorded, from_step=step + 1, steps=1)
    assert first(near) == (step + 1, micro_batch, "gradient_digest")
    assert "no field of the identity differs" in (near.cause or "")


def test_an_operator_that_adds_in_another_order_is_found(recorded: Path) -> None:
    PLANTED["order"] = True
    step, micro_batch, quantity = first(verified(recorded, all_steps=True))
    assert (step, quantity) == (1, "gradient_digest")
    assert micro_batch is not None


@pytest.mark.scenario
def test_elsewhere_numbers_are_compared_within_a_tolerance_that_is_told(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_facts, "numerics_probe", lambda device: "another kind of processor")
    PLANTED["order"] = True
    found = verified(recorded, share=1.0)
    assert found.same and not found.same_bits and not found.weights
    assert found.tolerance == 1e-3
    assert "numerics_probe was" in found.elsewhere[0]
    PLANTED.clear()
    PLANTED["shift"] = 0.5
    assert not verified(recorded, all_steps=True).same


@pytest.mark.scenario
def test_elsewhere_every_step_is_compared_though_each_has_other_bits(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding in the steps before ends no span: a forged value behind them is found, and a sound run is the same."""
    monkeypatch.setattr(run_facts, "numerics_probe", lambda device: "another kind of processor")
    PLANTED["order"] = True
    found = verified(run, from_step=1, steps=9)
    assert (found.same, found.same_bits, found.steps) == (True, False, 9)
    change_ledger(run, 9, "loss", lambda value: value * 1.01)
    found = verified(run, from_step=1, steps=9)
    assert (first(found), found.steps) == ((9, None, "loss"), 9)


def test_a_span_ends_early_only_where_enough_steps_differ_by_more_than_may_be(recorded: Path) -> None:
    PLANTED["shift"] = 0.5
    found = verified(recorded, all_steps=True)
    assert first(found)[0] == 1
    assert 5 <= found.steps < STEPS


# --- whose source -----------------------------------------------------------------------------------------------

SOURCE = """
import torch
from torch import nn
import torch.nn.functional as F
import lockstep
from own.scale import SCALE

class Own(lockstep.Job):
    def model(self):
        return nn.Linear(4, 2)

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.randn(16, 4))

    def loss(self, model, batch):
        return lockstep.Loss(model(batch[0]).square().sum() * SCALE, len(batch[0]))
"""


BY_NAME = "import importlib\nscale = importlib.import_module('own.' + 'scale')\nSCALE = scale.SCALE"
BESIDE = "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nfrom scale import SCALE"


@pytest.mark.scenario
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("imported", "field"),
    [
        ("from own.scale import SCALE", "job.source"),
        (BESIDE, "job.source.own/scale.py"),
        (BY_NAME, "job.source.own/scale.py"),
    ],
)
def test_the_recorded_source_is_used_and_not_what_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: str, field: str
) -> None:
    (tmp_path / "own").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] in {"own", "scale"}]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "own" / "job.py").write_text(SOURCE.replace("from own.scale import SCALE", imported))
    (tmp_path / "own" / "scale.py").write_text("SCALE = 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = document(tmp_path / "runs", job={"use": "own.job:Own"}, batch={"global": 4, "micro": 2})
    run = Path(train(spec, local=True).folder)
    (tmp_path / "own" / "scale.py").write_text("SCALE = 2.0\n")
    found = verified(run, all_steps=True)
    assert found.same
    assert found.same_bits
    shutil.rmtree(tmp_path / "own")
    assert verified(run).same
    (run / "source" / "own" / "scale.py").write_text("SCALE = 2.0\n")
    changed = verified(run, all_steps=True)
    assert first(changed) == (1, 0, "gradient_digest")
    assert (changed.cause or "").startswith(f"{field} was ")


# --- the command ------------------------------------------------------------------------------------------------


@pytest.mark.scenario
def test_the_command_answers_with_an_object_and_an_exit_code(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (
        "verify",
        run.name,
        "--uri",
        "off",
        "--storage",
        str(run.parent),
        "--local",
        "--from",
        "7",
        "--steps",
        "1",
    )
    code, out, _ = here(monkeypatch, capfd, tmp_path, *words, "--json")
    answer = json.loads(out)
    assert (code, answer["same"], answer["steps"], answer["first_difference"]) == (0, True, 3, None)
    change_ledger(run, 7, "loss", lambda value: value + 1)
    code, out, _ = here(monkeypatch, capfd, tmp_path, *words, "--json")
    answer = json.loads(out)
    assert (code, answer["same"]) == (1, False)
    difference = answer["first_difference"]
    assert list(difference) == ["step", "micro_batch", "quantity", "recorded", "found"]
    assert (difference["step"], difference["micro_batch"], difference["quantity"]) == (7, None, "loss")
    assert difference["recorded"] == difference["found"] + 1
    code, out, _ = here(monkeypatch, capfd, tmp_path, *words)
    assert code == 1
    assert out.startswith("different: step 7: loss is recorded as ")


@pytest.mark.parametrize(
    ("options", "problem", "facts"),
    [
        ({"from_step": 13}, problems.NO_SUCH_STEP, {"option": "from", "got": 13, "wanted": 12}),
        ({"from_step": 3, "all_steps": True}, calls_problems.SEVERAL_CHOICES, {}),
        ({"share": 1.5}, calls_problems.SHARE, {"got": 1.5}),
        ({"workers": 2}, calls_problems.WORKERS_LOCAL, {"got": 2}),
        ({"workers": 9, "local": False}, calls_problems.WORKERS_MOST, {"got": 9, "wanted": 4}),
    ],
)
def test_mistakes_are_told_in_one_line(
    recorded: Path, options: dict[str, Any], problem: Problem[Any], facts: dict[str, Any]
) -> None:
    with raises(problem, **facts) as told:
        verified(recorded, **options)
    assert told.value.exit_code == 2


def test_a_run_that_is_not_there_is_told_in_one_line(recorded: Path) -> None:
    with raises(problems.NO_RECORD, run="nowhere") as told:
        verified(recorded.parent / "nowhere")
    assert "\n" not in str(told.value)


# --- what a stranger meets --------------------------------------------------------------------------------------


def edited_fields(run: Path, **fields: Any) -> None:
    """Change them, and the identity in the summary with them."""
    changed = {**json.loads((run / "fields.json").read_text()), **fields}
    (run / "fields.json").write_text(json.dumps(changed))
    forge_result(run, identity=identity_digest(changed))


@pytest.mark.scenario
def test_fields_that_are_not_as_recorded_are_told_though_every_bit_is_equal(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other data beside those that these steps use, or a record that was edited: neither shows in any bit."""
    edited_fields(run, **{"data.fingerprint": "another", "version.python": "3.9.1"})
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps({**environment, "python": "3.9.1"}, indent=2))
    sealed_again(run)
    found = verified(run, steps=1)
    assert found.same and found.same_bits
    assert [(one.field, one.recorded) for one in found.fields or ()] == [
        ("version.python", "3.9.1"),
        ("data.fingerprint", "another"),
    ]
    words = ("verify", run.name, "--uri", "off", "--storage", str(run.parent), "--local", "--steps", "1")
    code, out, _ = here(monkeypatch, capfd, tmp_path, *words)
    told, other = (
        next(line for line in out.splitlines() if line.startswith(words)) for words in ("not as", "bits may")
    )
    assert code == 0
    assert told.startswith("not as recorded   data.fingerprint was 'another' and is ")
    assert other.startswith("bits may differ   version.python was '3.9.1' and is ")
    (run / "fields.json").unlink()
    code, out, _ = here(monkeypatch, capfd, tmp_path, *words)
    assert code == 1 and "fields.json is recorded as " in out
    assert "not known         whether versions, device, source and data are those of the run" in out


def test_rows_that_a_finished_run_has_lost_at_its_end_are_found(run: Path) -> None:
    ledger = pq.read_table(run / "ledger.parquet")
    pq.write_table(ledger.filter(pa.compute.less(ledger["step"], 11)), run / "ledger.parquet")
    assert first(verified(run)) == (11, None, "row")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("fields.json", "{", "its fields.json cannot be read: "),
        ("fields.json", "[]", "its fields.json cannot be read: it holds a list, wanted a mapping"),
        ("ledger.parquet", "", "ledger: cannot read "),
        ("spec.yaml", "a: [b", "its record in .* cannot be understood: "),
        ("run.json", "{", "its run.json in "),
    ],
)
@pytest.mark.parametrize("command", ["verify", "diff", "replay", "attest"])
def test_a_damaged_record_is_told_in_one_line_and_is_no_difference(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    name: str,
    content: str,
    message: str,
) -> None:
    (run / name).write_text(content)
    more = {"verify": ["--local"], "diff": [run.name], "replay": ["--step", "3"], "attest": []}[command]
    code, out, said = here(
        monkeypatch, capfd, tmp_path, command, run.name, *more, "--uri", "off", "--storage", str(run.parent)
    )
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"lockstep: .*{message}.*\n", said)


def test_a_run_that_mlflow_recorded_is_told_apart_from_one_that_is_not_there(run: Path) -> None:
    (run / "run.json").unlink()
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    (run / "spec.yaml").write_text(
        yaml.safe_dump({**spec, "record": {**spec["record"], "uri": "sqlite:///m.db"}})
    )
    with raises(problems.RECORD_IN_STORE, run=run.name):
        verified(run)


@pytest.mark.scenario
def test_a_fork_is_verified_from_where_it_was_forked(recorded: Path) -> None:
    """Its ledger has no step before: none is counted, and none can be asked for."""
    fork = {"run": recorded.name, "step": 4}
    run = Path(train(document(recorded.parent, fork=fork, rehearsal="off", seed=9), local=True).folder)
    found = verified(run, all_steps=True)
    assert found.same and found.steps == 8 and found.fields == []
    assert [(one.start + 1, one.until) for one in found.spans] == [(5, 12)]
    assert verified(run, share=1.0).steps == 8
    assert verified(run, from_step=6, steps=1).steps == 2
    with raises(problems.NO_SUCH_STEP, option="from", got=4, wanted="5 to 12: it is a fork"):
        verified(run, from_step=4)
    where: Any = {"uri": "off", "storage": run.parent}
    with raises(problems.NO_SUCH_STEP, option="step", got=4, wanted="5 to 12: it is a fork"):
        replay(run.name, 4, **where)
    assert replay(run.name, 6, **where).difference == ""
    found_diff = diff(run.name, recorded.name, **where)
    assert (found_diff.same, found_diff.first_difference and found_diff.first_difference.step) == (False, 5)
    assert diff(run.name, run.name, **where).steps == 8
    assert attest(run.name, out=run / "stated.json", **where).steps == 8
    whole = recorded_run(run.name, "off", run.parent)
    newest = whole.spec.model_copy(update={"fork": Fork(run=recorded.name)})
    cut = replace(whole, spec=newest, steps={step: row for step, row in whole.steps.items() if step > 6})
    assert (whole.forked_at, cut.forked_at) == (4, 4), "also where the spec names no step, and rows are lost"
    told = verified(run, all_steps=True).told["spec.yaml"]
    assert "fork.run" in told and "fork.storage" not in told and "initial_weights" not in told
    for forged in (fork | {"step": 3}, fork | {"exact": True}):
        as_forged = whole.spec.model_copy(update={"fork": Fork(**forged)})
        (wrong,) = _of_fork(replace(whole, spec=as_forged))
        assert wrong.what.startswith("spec.yaml: fork")
    assert list(_of_fork(whole)) == []
    spec_file = run / "spec.yaml"
    spec_file.write_text(spec_file.read_text().replace("step: 4", "step: 3"))
    sealed_again(run)
    found = verified(run, from_step=11)
    assert found.first_difference is not None and found.first_difference.quantity == "spec.yaml: fork.step"


def test_a_variable_that_nothing_reads_is_told(recorded: Path, tmp_path: Path) -> None:
    """Whoever adds one gives a run another identity."""
    run = Path(shutil.copytree(recorded, tmp_path / recorded.name))
    assert "fields.json" not in verified(run).told
    fields = json.loads((run / "fields.json").read_text()) | {f"{VARIABLE}CORPUS": "/data"}
    (run / "fields.json").write_text(json.dumps(fields))
    summary = json.loads((run / "summary.json").read_text()) | {"identity": identity_digest(fields)}
    (run / "summary.json").write_text(json.dumps(summary))
    sealed_again(run)
    found = verified(run)
    assert found.same
    assert found.told["fields.json"] == (f"{VARIABLE}CORPUS",)


def test_weights_that_a_run_began_with_are_told(recorded: Path, tmp_path: Path) -> None:
    whole = recorded_run(recorded.name, "off", recorded.parent)
    begun = whole.spec.model_copy(update={"initial_weights": "/some/weights.safetensors"})
    assert "initial_weights" in told_of(replace(whole, spec=begun), tmp_path)["spec.yaml"]
    assert "initial_weights" not in told_of(whole, tmp_path)["spec.yaml"]
