"""What is exported computes what the run's model computes, bit for bit where that is promised; else nothing is left behind."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep import train
from lockstep.calls import problems as calls_problems
from lockstep.calls.attestation import attest
from lockstep.calls.exporting import Exported, export, predict
from lockstep.checkpoint.stored_tensor import in_memory
from lockstep.errors import LockstepError, Problem
from lockstep.export import arrays, exporting, formats
from lockstep.export import problems as export_problems
from lockstep.job.loading import load_job
from lockstep.record.ledger.tables import read_history
from lockstep.record.mirror.final_model_files import GRAPH
from lockstep.training import stored_weights
from lockstep.training.auxiliary_state import load_beside, save_beside
from lockstep.training.integrity.state_digest import weights_digest
from tests.empty_store import put_empty_store
from tests.forked import script
from tests.in_process import here
from tests.live_bytes import counted
from tests.raised import raises
from tests.unit.export.exported_jobs import EVALUATED, PLANTED, Pair, points


def document(storage: Path, job: str, **more: Any) -> dict[str, Any]:
    return {
        "job": {"use": f"tests.unit.export.exported_jobs:{job}"},
        "seed": 3,
        "length": {"steps": 4},
        "batch": {"global": 12, "micro": 12},
        "checkpoint": {"storage": str(storage)},
        "record": {"uri": "off"},
        "rehearsal": "off",
        **more,
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose model has one input. It has best weights, of its first evaluation."""
    stop = {"metric": "eval/loss", "mode": "min", "patience": 9}
    rate = {"name": "sgd", "lr": 50.0}  # so that it gets worse
    found = train(
        document(
            tmp_path_factory.mktemp("one"),
            "One",
            evaluate={"every": {"steps": 1}},
            early_stop=stop,
            optimizer=rate,
        ),
        local=True,
    )
    return Path(found.folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with three inputs, of which two have rows, two outputs, and averaged weights."""
    return Path(train(document(tmp_path_factory.mktemp("two"), "Two", ema=0.9), local=True).folder)


@pytest.fixture
def run(one: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(one, tmp_path / one.name))


@pytest.fixture(autouse=True)
def nothing_planted() -> Iterator[None]:
    PLANTED.clear()
    yield
    PLANTED.clear()


def exported(folder: Path, **more: Any) -> Exported:
    return export(folder.name, uri="off", storage=folder.parent, **more)


def predicted(folder: Path, file: Path, **more: Any) -> dict[str, Tensor]:
    found = predict(folder.name, file, uri="off", storage=folder.parent, **more)
    if found.path.endswith(".safetensors"):
        return dict(load_file(found.path))
    arrays = np.load(found.path)
    return {"": torch.from_numpy(arrays)} if isinstance(arrays, np.ndarray) else dict(arrays)


def contents(folder: Path) -> dict[str, str]:
    """Every file and folder below, with the sha256 of files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_arrays_of_any_name_and_shape_come_back(tmp_path: Path, suffix: str) -> None:
    """A scalar among them; and numpy's own arguments are called `file` and `allow_pickle`."""
    path = tmp_path / f"x{suffix}"
    given = {
        "file": torch.arange(6.0).reshape(2, 3).T,
        "allow_pickle": torch.tensor(2),
        "scale": torch.tensor(0.5, dtype=torch.float64),
    }
    given["again"] = given["scale"]  # one tensor in two outputs
    arrays.write(path, given)
    found = arrays.read(path)
    assert {name: (one.dtype, one.shape, one.tolist()) for name, one in found.items()} == {
        name: (one.dtype, one.shape, one.tolist()) for name, one in given.items()
    }


# --- equal ------------------------------------------------------------------------------------------------------


@pytest.mark.scenario
def test_a_prediction_gives_the_loss_that_the_run_recorded(run: Path, tmp_path: Path) -> None:
    """Bit for bit, though nothing of the job is there: weights, mode, and what was drawn with the model are the run's."""
    found = exported(run).artifact
    assert (found.weights, found.weights_digest) == ("final", summary(run)["weights_digest"])
    assert (found.parity.differing, found.parity.largest_difference) == (0, 0.0)
    assert found.parity.batch_sizes == (1, 2, 3, 7)
    assert [value.model_dump() for value in (*found.inputs, *found.outputs)] == [
        {"name": "x", "dtype": "float32", "shape": ("batch", 8)},
        {"name": "output", "dtype": "float32", "shape": ("batch", 3)},
    ]
    x, y = points(EVALUATED, 2)
    np.save(tmp_path / "x.npy", x.numpy())
    done = script(
        "import sys\nfrom lockstep.calls.exporting import predict\n"
        f"predict({run.name!r}, {str(tmp_path / 'x.npy')!r}, uri='off', storage={str(run.parent)!r})\n"
        "assert not [name for name in sys.modules if name.startswith('tests.unit')]\n"
    )
    assert done.wait() == 0, done.communicate()
    logits = torch.from_numpy(np.load(tmp_path / "x.outputs.npy"))
    loss = float(F.cross_entropy(logits, y, reduction="sum")) / EVALUATED
    assert loss == summary(run)["metrics"]["eval/loss"]


def test_the_best_weights_are_others(run: Path, tmp_path: Path) -> None:
    best, final = exported(run, best=True), exported(run)
    assert best.artifact.step == summary(run)["best_step"] != final.artifact.step
    assert best.artifact.weights_digest == summary(run)["best_digest"] != final.artifact.weights_digest
    x, y = points(EVALUATED, 2)
    save_file({"x": x}, tmp_path / "x.safetensors")
    losses = [
        float(F.cross_entropy(predicted(run, tmp_path / "x.safetensors", best=it)["output"], y))
        for it in (True, False)
    ]
    assert losses[0] < losses[1]


@pytest.mark.parametrize("form", ["pt2", "torchscript", "safetensors"])
def test_a_full_disk_is_told_and_leaves_nothing(run: Path, form: str) -> None:
    """Torch ends the process where it writes an archive to a full disk itself; safetensors has an error of its own."""
    before = contents(run)
    done = script(
        "import resource, signal\n"
        "from lockstep.calls.exporting import export\n"
        "from lockstep.errors import StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))\n"
        "try:\n"
        f"    export({run.name!r}, form={form!r}, uri='off', storage={str(run.parent)!r})\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    out, _ = done.communicate()
    assert done.wait() == 0
    assert out.startswith("export: cannot write '") and "File too large" in out
    assert contents(run) == before


@pytest.mark.parametrize("form", ["pt2", "torchscript", pytest.param("onnx", marks=pytest.mark.exact)])
def test_several_inputs_and_outputs(two: Path, tmp_path: Path, form: str) -> None:
    """The averaged weights, any number of rows, and an input that all rows share."""
    found = exported(two, form=form).artifact
    assert (found.weights, found.weights_digest) == ("ema", summary(two)["ema_digest"])
    shapes = {value.name: value.shape for value in (*found.inputs, *found.outputs)}
    assert shapes == {
        "x": ("batch", 4), "words": ("batch", 2), "positions": (2,), "logits": ("batch", 3), "mean": ("batch",)
    }  # fmt: skip
    job = load_job("tests.unit.export.exported_jobs:Two", {})
    x, words, _ = job.train_data()[:24]  # type: ignore[index]
    given = {"x": x.contiguous(), "words": words, "positions": torch.arange(1.0, 3.0)}
    np.savez(tmp_path / "given.npz", **{name: one.numpy() for name, one in given.items()})
    save_file(given, tmp_path / "given.safetensors")
    model = Pair().eval()
    model.load_state_dict(load_file(two / "weights" / "ema.safetensors"))
    with torch.no_grad():
        wanted = [
            model(x[rows], words[rows], given["positions"])
            for rows in (slice(0, 10), slice(10, 20), slice(20, 24))
        ]
    for name in ("given.npz", "given.safetensors"):
        got = predicted(two, tmp_path / name, form=form, batch=10)
        for output in ("logits", "mean"):
            expected, other = torch.cat([one[output] for one in wanted]), torch.as_tensor(got[output])
            if form == "onnx":  # another runtime, within what docs/export.md allows it
                torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(other, expected)


@pytest.mark.scenario
def test_onnx_is_within_its_tolerance_and_says_how_far_off(run: Path, tmp_path: Path) -> None:
    found = exported(run, form="onnx").artifact
    assert (found.parity.rtol, found.parity.atol) == (1e-4, 1e-5)
    assert found.parity.batch_sizes == (1, 2, 3, 7)
    assert found.runtime.startswith("onnxruntime ")
    np.save(tmp_path / "x.npy", points(5, 7)[0].numpy())
    assert predicted(run, tmp_path / "x.npy", form="onnx")[""].shape == (5, 3)


def test_weights_alone_say_where_they_are_from_and_need_no_job(run: Path) -> None:
    PLANTED.add("no example")
    found = exported(run, form="safetensors")
    with safe_open(found.path, "pt") as file:
        metadata = file.metadata()
    digest = summary(run)["weights_digest"]
    assert metadata == {
        "run": run.name, "step": "4", "weights": "final", "weights_digest": digest, "format": "pt"
    }  # fmt: skip
    assert weights_digest(load_file(found.path)) == digest == found.artifact.weights_digest


def test_shards_have_the_weights_with_an_index(run: Path) -> None:
    """Files of at most so many bytes but for one with a single tensor; a run begins from them, and transformers reads them."""
    found = exported(run, form="shards", max_file_size="300 B")
    index = json.loads(Path(found.path, stored_weights.INDEX).read_text())
    files: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        files.setdefault(file, []).append(name)
    names = sorted(path.name for path in Path(found.path).glob("*.safetensors"))
    assert (
        sorted(files)
        == names
        == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    )
    assert len(files) > 1
    tensors = {}
    for file, inside in files.items():
        of_file = load_file(Path(found.path, file))
        assert sorted(of_file) == sorted(inside)
        assert len(inside) == 1 or sum(tensor.nbytes for tensor in of_file.values()) <= 300
        tensors |= of_file
    assert weights_digest(tensors) == summary(run)["weights_digest"] == found.artifact.weights_digest
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert weights_digest(stored_weights.stored_folder(Path(found.path)), in_memory) == weights_digest(
        tensors
    )
    (whole,) = Path(exported(run, form="shards").path).iterdir()  # fits into one file
    assert whole.name == stored_weights.SINGLE
    assert weights_digest(load_file(whole)) == weights_digest(tensors)


def test_a_size_is_written_as_for_save_pretrained() -> None:
    shards = formats.Shards()
    for size, most in {"2GB": 2 * 10**9, "500 MiB": 500 << 20, "7kb": 7000, "1tib": 1 << 40, "9B": 9}.items():
        assert shards.limited(size).most_file_bytes == most
    assert shards.most_file_bytes == 5 * 10**9
    for size in ("", "0GB", "GB", "5", "1.5GB", "-1GB", "5GiB5"):
        with raises(export_problems.FILE_SIZE, got=size):
            shards.limited(size)


@pytest.mark.parametrize("form", ["safetensors", "shards"])
def test_weights_are_exported_one_tensor_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The control has all of them."""
    monkeypatch.setattr(formats.Shards, "most_file_bytes", 200_000)
    given = {f"layer.{i}": torch.randn(100, 200) for i in range(16)}
    path, digest = tmp_path / "given.safetensors", weights_digest(given)
    save_file(given, path)
    del given
    wanted = formats.format_named(form)
    assert isinstance(wanted, formats.Safetensors)
    with counted() as streamed:
        state = stored_weights.stored_folder(path)
        written = exporting.export_weights(
            exporting.Weights("run", 1, "final", digest, state), wanted, tmp_path
        )
    with counted() as whole:
        held = {name: in_memory(value) for name, value in state.items()}
    assert streamed.peak <= 2 * 100 * 200 * 4
    assert whole.peak == sum(tensor.nbytes for tensor in held.values()) == 8 * 2 * 100 * 200 * 4
    assert len(list(tmp_path.rglob("model-*.safetensors"))) == (8 if form == "shards" else 0)
    assert weights_digest(stored_weights.stored_folder(written), in_memory) == digest


def test_more_inputs_are_compared_where_they_are_given(run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", points(300, 7)[0].numpy())
    found = exported(run, form="torchscript", inputs=tmp_path / "x.npy").artifact
    assert found.parity.batch_sizes == (1, 2, 3, 7, 44, 256)


def test_a_fixed_batch_takes_any_number_of_rows_all_the_same(run: Path, tmp_path: Path) -> None:
    PLANTED.add("three rows")
    before = contents(run)
    with raises(export_problems.FIXED_ROWS):
        exported(run)
    assert contents(run) == before
    found = exported(run, fixed_batch=True).artifact
    assert (found.fixed_batch, found.inputs[0].shape, found.parity.batch_sizes) == (3, (3, 8), (3,))
    x = points(7, 7)[0]
    np.save(tmp_path / "x.npy", x.numpy())
    whole = predicted(run, tmp_path / "x.npy")[""]
    np.save(tmp_path / "x.npy", x[:6].numpy())
    assert torch.equal(predicted(run, tmp_path / "x.npy")[""], whole[:6]) and len(whole) == 7
    with raises(export_problems.FIXED_BATCH, got=7, wanted=3):
        predicted(run, tmp_path / "x.npy", batch=7)


def test_outputs_that_calls_cannot_be_joined_to_are_refused(run: Path, tmp_path: Path) -> None:
    """A value for each pair of rows takes one call with all of them; a fixed batch, which has as many classes as rows, is no such output."""
    x = points(10, 7)[0]
    np.save(tmp_path / "x.npy", x.numpy())
    assert exported(run, fixed_batch=True).artifact.outputs[0].shape == (3, 3)
    assert len(predicted(run, tmp_path / "x.npy")[""]) == 10
    PLANTED.add("pairs")
    for fixed in (True, False):
        exported(run, fixed_batch=fixed)
        with raises(export_problems.WITHOUT_ROWS, rows=10) as caught:
            predicted(run, tmp_path / "x.npy", batch=None if fixed else 4)
        assert caught.value.exit_code == 2
    assert predicted(run, tmp_path / "x.npy", batch=10)[""].shape == (10, 10)


def test_rows_that_follow_from_the_data_are_refused(run: Path, tmp_path: Path) -> None:
    PLANTED.add("picked")
    path = Path(exported(run, form="torchscript").path)
    told = json.loads(path.with_suffix(".json").read_text())
    told["outputs"][0]["shape"] = ["batch", 3]  # what a chance of the example could say
    path.with_suffix(".json").write_text(json.dumps(told))
    np.save(tmp_path / "x.npy", points(10, 7)[0].numpy())
    with raises(export_problems.PREDICTION_SHAPE, format="torchscript", rows="rows 0 to 3", wanted="(4, 3)"):
        predicted(run, tmp_path / "x.npy", form="torchscript", batch=4)


# --- not equal: nothing is left behind --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "planted", "problem", "facts"),
    [
        ("torchscript", "branch", export_problems.DIFFERENT, {"advice": re.compile("take them out of forward")}),
        ("torchscript", "traced", export_problems.DIFFERENT, {"format": "torchscript"}),
        ("pt2", "one bit", export_problems.DIFFERENT, {"got": re.compile("elements have other bits, by up to "), "wanted": "no difference"}),
        ("pt2", "branch", export_problems.NOT_TRACED, {"where": re.compile(r"^, tests/unit/export/exported_jobs.py:\d+ in forward$")}),
        ("pt2", "sizes", export_problems.FIXED_ROWS, {}),
        ("torchscript", "sizes", export_problems.ROWS_FAIL, {"rows": 1, "advice": export_problems.SIZES}),
        ("pt2", "nested", export_problems.OUTPUT_KIND, {"name": "a", "got": "list"}),
    ],
)  # fmt: skip
def test_an_artifact_that_computes_something_else_is_an_error(
    run: Path, form: str, planted: str, problem: Problem[Any], facts: dict[str, Any]
) -> None:
    PLANTED.add(planted)
    before = contents(run)
    with raises(problem, **facts) as caught:
        exported(run, form=form)
    assert caught.value.exit_code == 1
    assert len(str(caught.value).splitlines()) == 1
    assert contents(run) == before


@pytest.mark.parametrize(
    "form", ["torchscript", *(pytest.param(form, marks=pytest.mark.exact) for form in ("pt2", "onnx"))]
)
def test_weights_that_change_on_their_way_into_the_artifact_are_found(
    run: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """In an artifact that is there already: it stays as it is."""
    exported(run, form=form)
    before = contents(run)

    def altered(form: Any, model: nn.Module, *more: Any, **options: Any) -> tuple[str, ...]:
        with torch.no_grad():
            model.get_parameter("out.bias")[1] += 2**-6
        return formats.write(form, model, *more, **options)

    monkeypatch.setattr(exporting, "write", altered)
    with raises(export_problems.DIFFERENT):
        exported(run, form=form)
    assert contents(run) == before


def test_a_difference_that_is_allowed_is_recorded(run: Path) -> None:
    PLANTED.add("one bit")
    found = exported(run, rtol=1e-5).artifact.parity
    assert found.differing == found.elements > 0
    assert 0 < found.largest_relative < 1e-6 and found.largest_difference > 0
    assert (found.rtol, found.atol) == (1e-5, 1e-5 / 10)


# --- beside the weights -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moving_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose after_step moves state of the model and of the job; its best weights are not its last ones."""
    stop = {"metric": "eval/loss", "mode": "min", "patience": 9}
    more = {"evaluate": {"every": {"steps": 1}}, "early_stop": stop, "optimizer": {"name": "sgd", "lr": 1.0}}
    return Path(train(document(tmp_path_factory.mktemp("moving"), "Anneals", **more), local=True).folder)


@pytest.fixture
def moving(moving_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(moving_once, tmp_path / moving_once.name))


def loss_of(run: Path, folder: Path, **more: Any) -> float:
    """The loss that an artifact has on the data of the evaluations, up to rounding: all rows are added at once, a run's by micro-batch."""
    x, y = points(EVALUATED, 2)
    np.save(folder / "x.npy", x.numpy())
    return float(F.cross_entropy(predicted(run, folder / "x.npy", **more)[""], y, reduction="sum") / len(y))


def test_what_training_moved_besides_the_weights_is_exported(moving: Path, tmp_path: Path) -> None:
    """Each artifact has the loss that the run recorded."""
    losses = {row.step: row.metrics["eval/loss"] for row in read_history(moving).evaluations}

    def check(step: int, **more: Any) -> None:
        assert exported(moving, form="torchscript", **more).artifact.step == step
        assert loss_of(moving, tmp_path, form="torchscript", **more) == pytest.approx(losses[step], rel=1e-6)

    best = summary(moving)["best_step"]
    assert best < 4
    check(best, best=True)
    check(4)


@pytest.mark.scenario
@pytest.mark.filterwarnings("default")  # those of MLflow and SQLAlchemy, about each other
def test_the_final_model_in_the_store_computes_the_recorded_loss(tmp_path: Path) -> None:
    """What MLflow has is the run's own model, averaged, with what training moved besides."""
    store = {"uri": put_empty_store(tmp_path / "mlflow.db"), "folder": str(tmp_path)}
    found = train(document(tmp_path, "Anneals", record=store, ema=0.5), local=True)
    graph = torch.export.load(Path(found.folder) / "model" / GRAPH).module()
    x, y = points(EVALUATED, 2)
    with torch.no_grad():
        loss = float(F.cross_entropy(graph(x), y, reduction="sum") / len(y))
    assert loss == pytest.approx(found.metrics["eval/loss"], rel=1e-6)  # added up in another order


def test_what_is_beside_the_weights_is_stated(moving: Path, tmp_path: Path) -> None:
    where: Any = {"out": tmp_path / "stated.json", "uri": "off", "storage": moving.parent}
    attest(moving.name, **where)
    stated = json.loads((tmp_path / "stated.json").read_text())
    told = json.loads((moving / "summary.json").read_text())["beside"]
    assert stated["predicate"]["beside"] == told and set(told) == {"final", "best"}
    assert f"{moving.name}/weights/final.beside.safetensors" in [one["name"] for one in stated["subject"]]
    weights = moving / "weights" / "final.safetensors"
    save_beside(weights, {**load_beside(weights), "extra": {"_extra_state": {"scale": 7.0}}})
    with raises(calls_problems.RECORD_CONTRADICTS, what="weights/final.beside.safetensors"):
        attest(moving.name, **where)


def test_what_is_beside_the_weights_is_that_of_the_record(moving: Path) -> None:
    """Of another run, or damaged: one line, and nothing is kept."""
    path = moving / "weights" / "final.beside.safetensors"
    held = load_file(path)
    save_file({name: value + 1 for name, value in held.items()}, path, safe_open(path, "pt").metadata())
    with raises(export_problems.WEIGHTS_CHANGED):
        exported(moving)
    path.write_bytes(b"")
    with pytest.raises(LockstepError, match=r"^weights: cannot read .*final\.beside\.safetensors"):
        exported(moving)
    exported(moving, form="safetensors")


# --- mistakes ---------------------------------------------------------------------------------------------------


def test_weights_that_are_not_those_of_the_record_are_not_exported(run: Path) -> None:
    path = run / "weights" / "final.safetensors"
    weights = load_file(path)
    weights["out.bias"][0] += 1
    save_file(weights, path)
    with raises(export_problems.WEIGHTS_CHANGED):
        exported(run)


def test_an_artifact_that_was_changed_or_outlived_is_not_run(run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", points(5, 7)[0].numpy())
    path = Path(exported(run, form="torchscript").path)
    told = summary(run)
    (run / "summary.json").write_text(json.dumps({**told, "weights_digest": "0" * 64}))
    with raises(calls_problems.EXPORTED_BEFORE, step=4):
        predicted(run, tmp_path / "x.npy", form="torchscript")
    (run / "summary.json").write_text(json.dumps(told))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with raises(export_problems.CHANGED, description="final.json"):
        predicted(run, tmp_path / "x.npy", form="torchscript")


def stopped(run: Path) -> None:
    (run / "summary.json").unlink()
    known = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**known, "status": "FAILED"}))


def without_best(run: Path) -> None:
    (run / "summary.json").write_text(json.dumps({**summary(run), "best_digest": None}))


MISTAKES: dict[str, tuple[list[str], Any, str]] = {
    "no such run": (["export", "0" * 32], None, f"run {'0' * 32}: no record of it in"),
    "no such format": (["export", "RUN", "--format", "keras"], None, "format: got 'keras', wanted pt2, onnx, torchscript, safetensors, shards or pretrained"),
    "no final weights": (["export", "RUN"], stopped, "is FAILED and has no final weights; they are written when a run ends"),
    "no best weights": (["export", "RUN", "--best"], without_best, "best: run RUN has no best weights; a run with early_stop keeps them"),
    "no example": (["export", "RUN"], lambda run: PLANTED.add("no example"), "has no example_input; write one and train, or export safetensors"),
    "no tolerance": (["export", "RUN", "--rtol", "1.5"], None, "rtol: got 1.5, wanted a relative difference from 0 to below 1"),
    "no size": (["export", "RUN", "--format", "shards", "--max-file-size", "big"], None, "max_file_size: got 'big', wanted a size such as 2GB or 500MiB"),
    "a size of one file": (["export", "RUN", "--max-file-size", "2GB"], None, "max_file_size: got '2GB' with format pt2"),
    "not exported": (["predict", "RUN", "x.npy", "--best"], None, "has no export/pt2/best.pt2; make it with `lockstep export RUN --format pt2 --best`"),
    "weights alone": (["predict", "RUN", "x.npy", "--format", "safetensors"], None, "format: got safetensors, which has weights alone; predict from pt2, "),
    "no such kind of file": (["predict", "RUN", "x.csv"], None, "inputs: got 'x.csv', wanted a .npy, .npz or .safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(
    mistake: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words, plant, message = MISTAKES[mistake]
    if plant is not None:
        plant(run)
    before = contents(tmp_path)
    words = [word.replace("RUN", run.name) for word in words]
    code, out, err = here(monkeypatch, capfd, tmp_path, *words, "--uri", "off", "--storage", str(run.parent))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message.replace("RUN", run.name) in err
    assert contents(tmp_path) == before


def test_what_a_run_lacks_for_an_export_is_a_problem(run: Path, tmp_path: Path) -> None:
    with raises(calls_problems.NOT_EXPORTED, run=run.name, got="export/pt2/final.pt2"):
        predicted(run, tmp_path / "x.npy")
    PLANTED.add("no example")
    with raises(calls_problems.NO_EXAMPLE, format="pt2"):
        exported(run)


def test_inputs_that_do_not_fit_are_one_line_each(run: Path, tmp_path: Path) -> None:
    exported(run, form="torchscript")
    x = points(5, 7)[0].numpy()
    wrong: dict[str, tuple[Any, Problem[Any], dict[str, Any]]] = {
        "a.npz": ({"y": x}, export_problems.INPUT_UNKNOWN, {"got": "y", "hint": "; known here: x"}),
        "b.npy": (
            x.astype(np.float64),
            export_problems.INPUT_DTYPE,
            {"name": "x", "got": "float64", "wanted": "float32"},
        ),
        "c.npy": (x[:, :5], export_problems.INPUT_SHAPE, {"got": (5, 5), "wanted": "(batch, 8)"}),
        "d.npy": (x[:0], export_problems.INPUT_ROWS, {"got": "0 rows of 'x'"}),
        "e.npy": (np.array(["a"]), export_problems.INPUTS_UNREADABLE, {}),
        "f.npz": ({}, export_problems.INPUT_MISSING, {"name": "x", "wanted": "x"}),
        "g.npy": (None, export_problems.INPUTS_UNREADABLE, {"got": re.compile("No such file")}),
    }
    for name, (content, problem, facts) in wrong.items():
        path = tmp_path / name
        if isinstance(content, dict):
            np.savez(path, **content)
        elif content is not None:
            np.save(path, content)
        with raises(problem, **facts):
            predicted(run, path, form="torchscript")
    np.save(tmp_path / "x.npy", x)
    with raises(export_problems.FILE_KIND, option="output", got=tmp_path / "x.csv"):
        predicted(run, tmp_path / "x.npy", form="torchscript", out=tmp_path / "x.csv")
    (tmp_path / "link.npy").symlink_to("x.npy")
    before = contents(tmp_path)
    for name in ("x.npy", "link.npy", f"../{tmp_path.name}/x.npy"):
        with raises(calls_problems.REPLACES_INPUTS):
            predicted(run, tmp_path / "x.npy", form="torchscript", out=tmp_path / name)
    assert contents(tmp_path) == before


def test_a_format_whose_packages_are_missing_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with raises(export_problems.PACKAGES, format="onnx", got="onnxruntime") as caught:
        exported(run, form="onnx")
    assert caught.value.remedy == "pip install 'lockstep-train[onnx]', or choose another format"


# --- through the command, and in a store ------------------------------------------------------------------------


def test_the_commands_say_what_they_have_done(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    where = ("--uri", "off", "--storage", str(run.parent))
    code, out, err = here(monkeypatch, capfd, tmp_path, "export", run.name, "--format", "torchscript", *where)
    assert code == 0, err
    assert out.splitlines()[0] == f"exported: final weights of run {run.name}, step 4, as torchscript"
    assert "compared          with eager mode, on 1, 2, 3, 7 rows: every bit is equal" in out
    np.save(tmp_path / "x.npy", points(5, 7)[0].numpy())
    words = ["predict", run.name, "x.npy", "--format", "torchscript", "--output", "y.npz", "--json", *where]
    code, out, err = here(monkeypatch, capfd, tmp_path, *words)
    assert code == 0, err
    assert json.loads(out) == {
        "path": "y.npz", "rows": 5, "batch": 256, "run": run.name, "step": 4, "weights": "final",
        "weights_digest": summary(run)["weights_digest"], "format": "torchscript",
    }  # fmt: skip
    assert np.load(tmp_path / "y.npz")["output"].shape == (5, 3)


@pytest.mark.exact
@pytest.mark.filterwarnings("default")  # those of MLflow and SQLAlchemy, about each other
def test_a_recorded_run_of_the_digits_predicts_what_its_model_does_and_has_the_artifact_in_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = put_empty_store(tmp_path / "mlflow.db")
    found = train(
        "jobs/digits/train.yaml",
        ["length.epochs=1", f"checkpoint.storage={tmp_path / 'runs'}"],
        local=True,
        uri=uri,
    )
    for form in ("pt2", "onnx"):
        export(found.run_id, form=form, uri=uri, storage=tmp_path / "runs")
    job = load_job("jobs.digits.job:Digits", {})
    images = torch.stack([image for image, _ in job.eval_data()])  # type: ignore[union-attr,attr-defined]
    np.save(tmp_path / "images.npy", images.numpy())
    predict(found.run_id, tmp_path / "images.npy", batch=100, uri=uri, storage=tmp_path / "runs")
    model = job.model()
    model.load_state_dict(load_file(Path(found.folder, "weights", "final.safetensors")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        wanted = torch.cat([model.eval()(part) for part in images.split(100)])
    torch.set_num_threads(threads)
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "images.outputs.npy")), wanted)
    from mlflow import MlflowClient

    there = MlflowClient(uri).list_artifacts(found.run_id, "export/onnx")
    assert [file.path for file in there] == ["export/onnx/final.json", "export/onnx/final.onnx"]


# --- in the form of another library -----------------------------------------------------------------------------


def test_a_model_is_kept_in_the_form_of_its_library(tmp_path: Path) -> None:
    """Again over the one before; and not where the library reads another bit than it wrote."""
    run = Path(train(document(tmp_path, "OfLibrary"), local=True).folder)
    assert json.loads((run / "fields.json").read_text())["job.identity.library"] == 3
    made = exported(run, form="pretrained")
    folder = run / "export" / "pretrained" / "final"
    assert Path(made.path) == folder
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {"inner/weights.pt", "words.txt"}
    assert made.artifact.weights_digest == weights_digest(torch.load(folder / "inner" / "weights.pt"))
    assert exported(run, form="pretrained").artifact == made.artifact
    before = contents(run)
    PLANTED.add("one bit")
    with raises(
        export_problems.OTHER_WEIGHTS, format="pretrained", got=re.compile("^1 weights .*, such as 'bias'$")
    ):
        exported(run, form="pretrained")
    assert contents(run) == before


def test_a_model_without_a_form_of_its_own_is_refused(run: Path) -> None:
    before = contents(run)
    with raises(export_problems.NOT_PRETRAINED, got=re.compile(r"Net has no save_pretrained\(folder\)$")):
        exported(run, form="pretrained")
    with raises(export_problems.NO_PREDICTION, format="pretrained"):
        predict(run.name, run / "x.npy", form="pretrained", uri="off", storage=run.parent)
    assert contents(run) == before
