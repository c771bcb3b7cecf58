"""G7: what a user can get wrong, through the command: one line that says what and where, the exit code, and what is left.

Mistakes in a spec are in test_spec.py, those in a loss's values, in gradients and in the machine in test_mistakes.py of
tests/distributed. A mistake that is found before the first step leaves nothing behind; one that is found later leaves a run
that FAILED, and the line names it and its traceback.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lockstep.driver.local  # noqa: F401 - what it imports is not what is timed here
from tests.empty_store import put_empty_store
from tests.in_process import here
from tests.unit.cli.test_command import ROOT, command, environment

RIGHT = """
import sys, threading
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split
import lockstep
from lockstep import Mean

def points(samples):
    x = torch.arange(samples * 4.0).view(samples, 4).sin()
    return TensorDataset(x, x.argmax(1))

class Right(lockstep.Job):
    def model(self):
        return nn.Linear(4, 4)
    def train_data(self):
        return points(32)
    def eval_data(self):
        return TensorDataset(*(t[32:] for t in points(40).tensors))
    def loss(self, model, batch):
        x, y = batch
        return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))

class Silent(Right):
    def eval_data(self):
        return None

class Items(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return self.item(index)

"""

SPEC = {"batch": {"global": 8, "micro": 4}, "length": {"steps": 2}, "record": {"uri": "off"}}

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Call]:
    """The command in a folder of a user's own, with the job that `source` adds to RIGHT as `theirs:Wrong`."""

    def called(*words: str, source: str = "class Wrong(Right): pass", **spec: Any) -> tuple[int, str, str]:
        (tmp_path / "theirs.py").write_text(RIGHT + source + "\n")
        document = {"job": {"use": "theirs:Wrong"}, **SPEC, **spec}
        (tmp_path / "spec.yaml").write_text(json.dumps(document))
        return here(monkeypatch, capfd, tmp_path, *words)

    if not _IMPORTED:  # what trains, which `quick` leaves out
        _IMPORTED.append("all")
        code, _, err = called(
            "train", "spec.yaml", "--local", source="class Wrong(Right): pass", workers={"max": 1}
        )
        assert code == 0, err
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        _forget()
    yield called
    _forget()


_IMPORTED: list[str] = []


def _forget() -> None:
    for name in [name for name in sys.modules if name.startswith("theirs")]:
        del sys.modules[name]


@contextmanager
def quick() -> Iterator[None]:
    """What needs no training is told within two seconds of this process, in which all that trains is imported already."""
    began = time.process_time()
    yield
    assert time.process_time() - began < 2


def line_of(source: str, text: str) -> int:
    """The line of theirs.py that holds `text`."""
    (found,) = (i for i, line in enumerate((RIGHT + source).splitlines(), 1) if text in line)
    return found


def only_line(err: str) -> str:
    (line,) = err.splitlines()
    assert line.startswith("lockstep: ")
    return line


def left(folder: Path) -> list[str]:
    """What a command has left, but for what the test wrote and Python's own cache."""
    return sorted(
        path.name for path in folder.iterdir() if path.name not in {"theirs.py", "spec.yaml", "__pycache__"}
    )


# --- found when the job is loaded: exit code 2, nothing left behind ------------------------------------------

METHODS = {
    "training_step": "write loss(model, batch)", "validation_step": "write metrics(model, batch)",
    "compute_loss": "write loss(model, batch)", "configure_optimizers": "set optimizer and schedule in the spec",
    "forward": "the model is the nn.Module that model() returns", "metric": "write metrics(model, batch)",
    "collate_fn": "write collate(samples)", "train_dataloader": "write train_data()",
    "val_dataloader": "write eval_data()", "dataloader": "write train_data()", "prepare_data": "write train_data()",
    "lr_scheduler": "set schedule in the spec", "sampler": "set data.shuffle in the spec", "on_epoch_end": "Lockstep calls no such hook", "fit": "Lockstep holds the loop",
    "optimiser": "did you mean optimizer()?", "metrcs": "did you mean metrics()?", "colate": "did you mean collate()?",
}  # fmt: skip

JOBS: dict[str, tuple[str, list[str]]] = {
    **{
        f"{name}() is written": (f"class Wrong(Right):\n  def {name}(self, *args): ...", [f"nothing calls {name}() of 'theirs:Wrong'; {meant}"])
        for name, meant in METHODS.items()
    },
    "there is no loss": (
        "class Wrong(lockstep.Job):\n  def model(self): ...\n  def train_data(self): ...",
        ["'theirs:Wrong' has no loss(); a job has model(), train_data() and loss(model, batch)"],
    ),
    "there is no model": ("class Wrong(lockstep.Job):\n  def loss(self, model, batch): ...", ["has no model()"]),
    "there are no data": (
        "class Wrong(lockstep.Job):\n  def model(self): ...\n  def loss(self, model, batch): ...", ["has no train_data()"]
    ),
    "loss() takes no model": (
        "class Wrong(Right):\n  def loss(self, batch): ...", ["loss() of 'theirs:Wrong' cannot be called as loss(model, batch)"]
    ),
    "metrics() takes no model": ("class Wrong(Right):\n  def metrics(self, batch): ...", ["cannot be called as metrics(model, batch)"]),
    "collate() takes more": ("class Wrong(Right):\n  def collate(self, samples, pad): ...", ["collate(samples): missing a required argument: 'pad'"]),
    "model() takes an input": ("class Wrong(Right):\n  def model(self, width): ...", ["cannot be called as model()"]),
    "optimizer() takes no model": ("class Wrong(Right):\n  def optimizer(self): ...", ["cannot be called as optimizer(model)"]),
    "__init__() takes no params": ("class Wrong(Right):\n  def __init__(self): ...", ["cannot be called as __init__(params)"]),
    "Params is no Params": ("class Wrong(Right):\n  class Params: pass", ["no subclass of lockstep.Params"]),
}  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("mistake", JOBS)
def test_a_mistake_in_the_jobs_class(mistake: str, call: Call, tmp_path: Path) -> None:
    source, words = JOBS[mistake]
    with quick():
        code, out, err = call("train", "spec.yaml", "--local", source=source)
    line = only_line(err)
    assert (code, out, left(tmp_path)) == (2, "", []), line
    assert line.startswith("lockstep: job.use: ")
    assert [word for word in words if word not in line] == [], line


PARAMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "one is misspelt": (
        "width: int = 4",
        {"widht": 8},
        "job.params.widht: unknown key; did you mean 'width'?",
    ),
    "one is of another type": (
        "width: int = 4",
        {"width": "wide"},
        "job.params.width: got 'wide', wanted a whole number",
    ),
    "one is missing": ("width: int", {}, "job.params.width: missing, and it has no default"),
}


@pytest.mark.parametrize("where", ["--local", "on Ray"])
@pytest.mark.parametrize("mistake", PARAMS)
def test_a_mistake_in_the_params(mistake: str, where: str, call: Call, tmp_path: Path) -> None:
    """On Ray as well: before it is started, where torch is imported already."""
    import ray

    connected = ray.is_initialized()  # by a test that ran before, in the same process
    declared, given, message = PARAMS[mistake]
    source = f"class Wrong(Right):\n  class Params(lockstep.Params):\n    {declared}"
    words = ["--local"] if where == "--local" else []
    with quick():
        code, _, err = call(
            "train", "spec.yaml", *words, source=source, job={"use": "theirs:Wrong", "params": given}
        )
    assert (code, only_line(err), left(tmp_path)) == (2, f"lockstep: {message}", [])
    assert ray.is_initialized() == connected


@pytest.mark.parametrize("mistake", PARAMS)
def test_a_mistake_in_a_sweeps_params(mistake: str, call: Call, tmp_path: Path) -> None:
    """In the spec that its trials share as in the space that they are drawn from: before Ray is started."""
    import ray

    connected = ray.is_initialized()
    declared, given, message = PARAMS[mistake]
    source = f"class Wrong(Right):\n  class Params(lockstep.Params):\n    {declared}"
    spaces: list[dict[str, Any]] = [{"optimizer.lr": {"choice": [0.1, 0.01]}}]
    spaces += [{f"job.params.{name}": {"grid": [value, value]}} for name, value in given.items()]
    for i, space in enumerate(spaces):
        document = {
            "spec": {**SPEC, "job": {"use": "theirs:Wrong", "params": {} if i else given}},
            "space": space,
        }
        (tmp_path / "sweep.yaml").write_text(json.dumps({**document, "trials": 2}))
        with quick():
            code, _, err = call("sweep", "sweep.yaml", source=source)
        assert (code, left(tmp_path)) == (2, ["sweep.yaml"])
        assert only_line(err) == f"lockstep: {message}"
        assert ray.is_initialized() == connected
        sys.modules.pop("theirs", None)


LATE_TRIAL = "class Wrong(Right):\n  class Params(lockstep.Params):\n    width: int = 4"


def test_a_mistake_in_a_later_trial_of_a_sweep(call: Call, tmp_path: Path) -> None:
    document = {
        "spec": {**SPEC, "job": {"use": "theirs:Wrong"}},
        "space": {"job.params.width": {"grid": [4, "wide"]}},
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(document))
    code, _, err = call("sweep", "sweep.yaml", source=LATE_TRIAL)
    assert (code, left(tmp_path)) == (2, ["sweep.yaml"])
    assert only_line(err) == "lockstep: job.params.width: got 'wide', wanted a whole number"


def test_a_class_of_the_script_that_runs(call: Call, tmp_path: Path) -> None:
    code, _, err = call("train", "spec.yaml", "--local", job={"use": "__main__:Wrong"})
    assert (code, left(tmp_path)) == (2, [])
    assert "a class of the script that runs; workers cannot import it" in only_line(err)


@pytest.mark.parametrize(
    ("body", "words"), [("raise ValueError('no')", "ValueError: no"), ("sys.exit()", "SystemExit")]
)
def test_a_job_that_cannot_be_made(body: str, words: str, call: Call, tmp_path: Path) -> None:
    source = f"class Wrong(Right):\n  def __init__(self, params):\n    {body}"
    code, _, err = call("train", "spec.yaml", "--local", source=source)
    assert (code, left(tmp_path)) == (1, [])
    assert f"theirs.py:{line_of(source, body)} in __init__: {words}" in only_line(err)


HELPERS = """
class Wrong(Right):
    def metrics(self, model, batch):
        return {"right": self.metric(model, batch)}
    def metric(self, model, batch):
        return self.forward(model, batch[0])
    @property
    def other(self):
        return [self.collate_fn for _ in ()]
    def collate_fn(self): ...
    def forward(self, model, x):
        return training_step(self)
    def training_step(self): ...
    def losses(self): ...

def training_step(job):
    return job.training_step()
"""


def test_a_method_that_the_job_itself_calls_may_have_any_name(call: Call) -> None:
    """The negative control of the names above."""
    code, out, err = call("train", "spec.yaml", "--dry-run", source=HELPERS)
    assert code == 0, err
    assert "global batch" in out


# --- found when the data are opened: by a dry run as by training ---------------------------------------------

DATA: dict[str, tuple[str, dict[str, Any], int, list[str]]] = {
    "train_data() raises": (
        "def train_data(self):\n    return open('digits.npz')", {}, 1,
        ["the job failed (while its data were opened, theirs.py:@open('digits in train_data): FileNotFoundError"],
    ),
    "eval_data() raises": ("def eval_data(self):\n    return 1 / 0", {}, 1, ["theirs.py:@1 / 0 in eval_data): ZeroDivisionError"]),
    "train_data() ends the process": (
        "def train_data(self):\n    sys.exit(0)", {}, 1, ["the job ended the process", "theirs.py:@sys.exit(0) in train_data", "sys.exit(0)"]
    ),
    "train_data() returns nothing": ("def train_data(self): ...", {}, 1, ["job.train_data: returned NoneType, wanted a map-style dataset"]),
    "train_data() returns a DataLoader": (
        "def train_data(self):\n    return DataLoader(points(32))", {}, 1, ["job.train_data: returned a DataLoader, wanted a map-style dataset", "return its dataset"]
    ),
    "eval_data() returns a DataLoader": ("def eval_data(self):\n    return DataLoader(points(32))", {}, 1, ["job.eval_data: returned a DataLoader"]),
    "train_data() is a stream": (
        "def train_data(self):\n    return Stream()", {}, 1, ["job.train_data: returned Stream, an IterableDataset", "map-style", "TarShards"]
    ),
    "train_data() returns tensors": ("def train_data(self):\n    return points(32).tensors", {}, 1, ["a tuple of 2 Tensors", "TensorDataset"]),
    "train_data() returns all splits": ("def train_data(self):\n    return {'train': points(32)}", {}, 1, ["job.train_data: returned dict"]),
    "train_data() has no length": ("def train_data(self):\n    return Endless()", {}, 1, ["train_data: Endless has no __len__"]),
    "there are too few samples": ("def train_data(self):\n    return points(5)", {}, 2, ["batch.global: ", "5 samples", "data.drop_last=false"]),
    "there are no samples": ("def train_data(self):\n    return points(0)", {}, 2, ["batch.global: ", "holds no sample"]),
    "shuffle=blocks without blocks": ("...", {"data": {"shuffle": "blocks"}}, 2, ["data.shuffle: got blocks, but train_data has none"]),
    "early_stop without eval_data": ("def eval_data(self): ...", {"early_stop": {}}, 2, ["early_stop: the job has no eval_data"]),
    "keep_best without eval_data": (
        "def eval_data(self): ...", {"checkpoint": {"keep_best": {}}}, 2, ["checkpoint.keep_best: the job has no eval_data"]
    ),
    "samples are left out that are not there": (
        "pass", {"data": {"without": "3,31-32"}}, 2, ["data.without: got id 32, wanted samples of train_data, which has 32, counted from 0"]
    ),
    "all samples are left out": ("pass", {"data": {"without": "0-31"}}, 2, ["data.without: leaves out all 32 samples of train_data"]),
}  # fmt: skip

STREAMS = """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(points(32))
class Endless:
    def __getitem__(self, index):
        return index
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["--dry-run", "--local"])
@pytest.mark.parametrize("mistake", DATA)
def test_a_mistake_in_the_data(mistake: str, how: str, call: Call, tmp_path: Path) -> None:
    body, spec, wanted, words = DATA[mistake]
    source = f"{STREAMS}class Wrong(Right):\n  {body}"
    with quick():
        code, out, err = call("train", "spec.yaml", how, "--json", source=source, **spec)
    line = only_line(err)
    check(line, words, source)
    assert code == wanted
    assert json.loads(out)["error"] == line.removeprefix("lockstep: ")
    assert left(tmp_path) == []


def test_a_run_without_a_sample_to_rehearse_on(call: Call, tmp_path: Path) -> None:
    """Its one step has two micro-batches, and both lose all samples. The control keeps one sample."""
    spec: dict[str, Any] = {"length": {"steps": 1}, "data": {"shuffle": "none", "without": "0-7"}}
    code, _, err = call("train", "spec.yaml", "--local", **spec)
    assert only_line(err).startswith("lockstep: data.without: leaves no sample to micro-batches 0 and 1")
    assert (code, left(tmp_path)) == (2, [])
    _forget()
    spec["data"]["without"] = "0-5,7"
    assert call("train", "spec.yaml", "--local", **spec)[0] == 0


def check(line: str, words: list[str], source: str) -> None:
    """All words are in the line; `@text ` stands for the number of the line that holds the text."""
    for word in words:
        placed = re.sub(r"@(.*) in ", lambda found: f"{line_of(source, found[1])} in ", word)
        assert placed in line, (placed, line)


def failed_run(folder: Path, line: str) -> None:
    """The line names the one run that is left, which FAILED, and the file with its traceback."""
    (run,) = (folder / "runs").iterdir()
    assert f"run {run.name}, whose traceback is in '{run}/error.txt'" in line
    assert "Traceback" in (run / "error.txt").read_text()
    assert json.loads((run / "run.json").read_text())["status"] == "FAILED"


# --- found before the first step -----------------------------------------------------------------------------

TRAINING: dict[str, tuple[str, list[str]]] = {
    "metrics() returns a tensor": (
        "def metrics(self, model, batch):\n    return torch.ones(3)",
        ["job.metrics: returned a tensor of shape (3,), wanted a dict of lockstep.Mean(total, weight)"],
    ),
    "metrics() returns tensors by name": (
        "def metrics(self, model, batch):\n    return {'accuracy': torch.ones(())}",
        ["job.metrics: 'accuracy' is a tensor of shape (), wanted lockstep.Mean(total, weight)"],
    ),
    "metrics() returns numbers by name": ("def metrics(self, model, batch):\n    return {'accuracy': 0.5}", ["job.metrics: 'accuracy' is float"]),
    "metrics() returns nothing": ("def metrics(self, model, batch): ...", ["job.metrics: returned None"]),
    "a mean of a vector": ("def metrics(self, model, batch):\n    return {'a': Mean(torch.ones(2), 1)}", ["total of 'a' is a tensor of shape (2,)"]),
    "a weight of None": ("def metrics(self, model, batch):\n    return {'a': Mean(1.0, None)}", ["weight of 'a' is None"]),
    "a metric is called loss": ("def metrics(self, model, batch):\n    return {'loss': Mean(1.0, 1)}", ["'loss' is the name of the loss"]),
    "metrics() ends the process": ("def metrics(self, model, batch):\n    sys.exit(3)", ["the job ended the process", "@sys.exit(3) in metrics", "sys.exit(3)"]),
    "loss() returns a tensor in evaluation": (
        "def loss(self, model, batch):\n    return super().loss(model, batch) if model.training else torch.ones(())",
        ["job.loss: returned Tensor in evaluation, wanted lockstep.Loss"],
    ),
    "optimizer() returns a list of something else": (
        "def optimizer(self, model):\n    return [torch.optim.SGD(model.parameters()), None]",
        ["job.optimizer: returned a list, wanted one torch.optim.Optimizer or a list of them", "the schedule is the spec's"],
    ),
    "optimizer() returns Lightning's pair": ("def optimizer(self, model):\n    return [1], [2]", ["job.optimizer: returned a tuple"]),
    "optimizer() returns a name": ("def optimizer(self, model):\n    return 'adam'", ["job.optimizer: returned str"]),
    "optimizer() evaluates the loss again": (
        "def optimizer(self, model):\n    class Again(torch.optim.SGD):\n        def step(self, closure):\n            closure()\n    return Again(model.parameters())",
        ["job.optimizer: Again evaluates the loss again within an update", "closure_calls"]
    ),
    "optimizer() raises": (
        "def optimizer(self, model):\n    return torch.optim.SGD(model.parameters(), lr=-1)",
        ["while its optimizer was made, theirs.py:@lr=-1 in optimizer): ValueError: Invalid learning rate: -1"],
    ),
    "optimizer() ends the process": ("def optimizer(self, model):\n    sys.exit()", ["the job ended the process", "@sys.exit() in optimizer"]),
    "optimizer() holds another model's parameters": (
        "def optimizer(self, model):\n    return torch.optim.SGD(self.model().parameters())", ["a parameter of shape (4, 4) and 1 more is none of the model's"]
    ),
    "model() ends the process": ("def model(self):\n    sys.exit('no weights')", ["the job ended the process", "@sys.exit( in model", "'no weights'"]),
    "loss() ends the process": ("def loss(self, model, batch):\n    sys.exit(0)", ["the job ended the process", "before training, theirs.py:@sys.exit(0) in loss"]),
    "a sample ends the process": (
        "def train_data(self):\n    return Ending()\nclass Ending(Items):\n  def item(self, index):\n    raise SystemExit(7)",
        ["data: sample ", "theirs.py:@SystemExit(7) in item): SystemExit: 7"],
    ),
    "collate() ends the process": ("def collate(self, samples):\n    sys.exit(7)", ["the collation of samples", "@sys.exit(7) in collate): SystemExit: 7"]),
    "loss() breaks in torch": (
        "def loss(self, model, batch):\n    return self.wide(model, batch[0])\n  def wide(self, model, x):\n    return model(torch.cat([x, x], 1))",
        ["theirs.py:@torch.cat in wide): RuntimeError: mat1 and mat2 shapes cannot be multiplied"],
    ),
    "the model breaks within": (
        "def model(self):\n    return Broken()\nclass Broken(nn.Linear):\n  def __init__(self):\n    super().__init__(4, 4)\n"
        "  def forward(self, x):\n    return super().forward(x).view(3)",
        ["theirs.py:@.view(3) in forward): RuntimeError: shape '[3]' is invalid"],
    ),
    "samples hold what cannot be read": (
        "def train_data(self):\n    return Locked()\n  def collate(self, samples):\n    return points(4).tensors\n"
        "class Locked(Items):\n  def item(self, index):\n    return threading.Lock()",
        ["data: sample 0 holds a _thread.lock, whose content cannot be read", "give Locked a fingerprint()"],
    ),
    "samples are objects that count": (
        "def train_data(self):\n    return Counted()\n  def collate(self, samples):\n    return samples\n"
        "  def loss(self, model, batch):\n    return super().loss(model, points(4).tensors)\n"
        "class Sample:\n  def __init__(self, n):\n    self.n = n\n"
        "class Counted(Items):\n  n = 0\n  def item(self, index):\n    self.n += 1\n    return Sample(self.n)",
        ["data: the first micro-batch, fetched twice under one seed, differs in batch[0].n"],
    ),
    "samples cannot be collated": (
        "def train_data(self):\n    return Odd()\nclass Odd(Items):\n  def item(self, index):\n    return object()",
        ["data: the collation of samples", "default_collate"],
    ),
}  # fmt: skip


@pytest.mark.every(9)
@pytest.mark.thinned(6)
@pytest.mark.parametrize("mistake", TRAINING)
def test_a_mistake_that_is_found_before_the_first_step(mistake: str, call: Call, tmp_path: Path) -> None:
    body, words = TRAINING[mistake]
    source = f"class Wrong(Right):\n  {body}"
    code, _, err = call("train", "spec.yaml", "--local", "--json", source=source)
    line = only_line(err)
    check(line, words, source)
    assert (code, left(tmp_path)) == (1, [])
    assert line.startswith("lockstep: the job failed (") == line.endswith("; --verbose shows the traceback")


LATER = """
class Wrong(Right):
    def train_data(self):
        return Torn()
class Torn(Items):
    def item(self, index):
        if index == 13:
            raise ValueError("torn file")
        return points(32)[index]
"""


def test_a_mistake_that_is_found_later_leaves_a_run_with_its_traceback(call: Call, tmp_path: Path) -> None:
    code, _, err = call("train", "spec.yaml", "--local", "--json", source=LATER, data={"shuffle": "none"})
    line = only_line(err)
    check(
        line, ["data: sample 13 failed (step 2, micro-batch 1, theirs.py:@raise ValueError in item)"], LATER
    )
    assert code == 1
    failed_run(tmp_path, line)


WITNESS = """
from pathlib import Path

class Wrong(Right):
    def loss(self, model, batch):
        if model.training:
            print(f"{len([*Path('runs').glob('*')])} runs", file=sys.stderr, flush=True)
        return super().loss(model, batch)
"""


@pytest.mark.scenario
@pytest.mark.parametrize("uri", [pytest.param("off", marks=pytest.mark.exact), "sqlite:///record.db"])
def test_the_runs_id_is_told_before_the_first_step(uri: str, call: Call, tmp_path: Path) -> None:
    """There is no run while it is rehearsed, and no step before whoever looks on can name the run to resume."""
    put_empty_store(tmp_path / "record.db")
    code, _, err = call("train", "spec.yaml", "--local", source=WITNESS, rehearsal="off", record={"uri": uri})
    assert code == 0, err
    (run,) = (tmp_path / "runs").glob("*")
    lines = re.findall(rf"0 runs|1 runs|run {run.name}$", err, re.MULTILINE)
    assert lines[:3] == ["0 runs", f"run {run.name}", "1 runs"]
    assert lines.count("0 runs") == 1


def test_the_right_job_is_told_nothing(call: Call) -> None:
    """The negative control of all of them."""
    code, out, err = call("train", "spec.yaml", "--local", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["warnings"] == []


SPLIT = """
class Wrong(Right):
    def train_data(self):
        return random_split(points(56), [42, 14])[0]
    def eval_data(self):
        return random_split(points(56), [42, 14])[1]
"""

LEAKING = """
class Wrong(Right):
    def train_data(self):
        return random_split(points(56), [42, 14])[0]
    def eval_data(self):
        torch.rand(1)
        return random_split(points(56), [42, 14])[1]
"""


@pytest.mark.scenario
def test_one_split_in_train_data_and_eval_data_leaks_nothing(call: Call) -> None:
    """Both are opened under one seed. One draw more before one of the two, and the split is another: that is told."""
    for source, leaks in ((SPLIT, False), (LEAKING, True)):
        code, out, err = call("train", "spec.yaml", "--local", "--json", source=source)
        assert code == 0, err
        told = " ".join(json.loads(out)["warnings"])
        assert (
            bool(
                re.search(
                    r"data: (at least )?\d+ of( \d+ looked at, of)? 14 evaluation samples are training samples too: the first is",
                    told,
                )
            )
            == leaks
        )
        report = json.loads(call("train", "spec.yaml", "--dry-run", "--json", source=source)[1])
        assert bool(report["plan"]["leakage"]["rows"]) == leaks
        for name in [name for name in sys.modules if name.startswith("theirs")]:
            del sys.modules[name]


CURRICULUM = """
class Harder(Items):
    epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def item(self, index):
        x, y = points(32)[index]
        return x * (1 + self.epoch), y

class Wrong(Right):
    def train_data(self):
        return Harder()
"""


def test_a_curriculum_that_nobody_moves_is_told(call: Call) -> None:
    code, out, err = call("train", "spec.yaml", "--local", "--json", source=CURRICULUM)
    assert code == 0, err
    (told,) = json.loads(out)["warnings"]
    assert told.startswith("data: nothing calls set_epoch() of Harder")


OBJECTS = """
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Graph:
    x: object

class Graphs(Items):
    def item(self, index):
        return Graph(torch.full((4,), float(Path("data.txt").read_text()) * index))

class Wrong(Right):
    def train_data(self):
        return Graphs()
    def eval_data(self):
        return None
    def collate(self, samples):
        return torch.stack([sample.x for sample in samples])
    def loss(self, model, batch):
        return super().loss(model, (batch, batch.argmax(1)))
"""


@pytest.mark.scenario
def test_a_run_whose_samples_are_objects_goes_on_with_its_own_data_alone(call: Call, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("0.1")
    _, out, _ = call("train", "spec.yaml", "--local", "--json", source=OBJECTS)
    first = json.loads(out)
    record = tmp_path / "runs" / first["run_id"] / "run.json"
    killed = json.dumps({**json.loads(record.read_text()), "status": "FAILED"})
    for value, wanted in (("0.2", 2), ("0.1", 0)):
        data.write_text(value)
        record.write_text(killed)
        code, out, err = call("resume", "--local", "--json", "--uri", "off", first["run_id"], source=OBJECTS)
        assert code == wanted, err
        if wanted:
            assert only_line(err).startswith("lockstep: resume: data.train.samples is ")
        else:
            assert json.loads(out)["weights_digest"] == first["weights_digest"]


# --- commands ------------------------------------------------------------------------------------------------

GONE = "0" * 32
LONG = "a" * 300


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("words", "wanted", "told"),
    [
        (["resume", "--local", "--uri", "off", GONE], 1, f"run {GONE}: no record of it in "),
        (["show", "--uri", "off", GONE], 1, f"run {GONE}: no record of it in 'runs'"),
        (["show", "--uri", "sqlite:///no.db", GONE], 1, "record.uri: there is no record at "),
        (["record", "sync", "--uri", "off", GONE], 1, GONE),
        (["pin", "--uri", "off", GONE, "3"], 1, GONE),
        (["show", "--uri", "off", ""], 1, "run '': no record of it in 'runs'; wanted a whole id, 32 hexadecimal digits"),
        (["show", "--uri", "off", "0000"], 1, "run 0000: no record of it in 'runs'; wanted a whole id, 32 hexadecimal digits"),
        (["record", "sync", "--uri", "off", ""], 1, "run '': no record of it in "),
        (["show", "--uri", "off", LONG], 1, "no record of it in 'runs'"),
        (["show", "--uri", "off", LONG, "--plot"], 2, "no record of it in 'runs'"),
        (["record", "check", "--uri", "off", LONG], 1, "no record of it in 'runs'"),
        (["resume", "--local", "--uri", "off", LONG], 1, "no record of it in "),
        (["runs", "--uri", "off", "--experiment", "x"], 2, "experiment: "),
        (["runs", "--uri", "off", "--storage", "nope"], 2, "storage: there is no folder 'nope'"),
        (["runs", "--uri", "off", "--limit", "0"], 2, "limit: got 0, wanted from 1 to 1000"),
        (["ui", "--port", "99999"], 2, "port: got 99999, wanted from 1 to 65535"),
        (["ui", "--uri", "file:nope"], 2, "a folder, in which MLflow keeps no runs any more"),
        (["runs", "--uri", "nope"], 2, "a folder, in which MLflow keeps no runs any more; wanted a database"),
        (["train", "spec.yaml", "--local", "--uri", "file:nope"], 2, "a folder, in which MLflow keeps no runs any more"),
        (["train", "spec.yaml", "--local", "--uri", "sqlite:///."], 2, "is a folder; wanted a file"),
        (["train", "spec.yaml", "--local", "--uri", "sqlite:///exp%41/m.db"], 2, "with a `%` or a `?` in its path"),
        (["train", "spec.yaml", "--local", "--uri", "sqlite:///what?/m.db"], 2, "with a `%` or a `?` in its path"),
        (["runs", "--uri", "sqlite:///exp%41/m.db"], 2, "with a `%` or a `?` in its path"),
        (["train", "spec.yaml", "--local", "--uri", "sqlite:///theirs.py"], 1, "cannot be used: file is not a database; it is a file of another kind"),
        (["train", "spec.yaml", "--local", "--chaos", "worker:0.5"], 2, "chaos: kills what runs on Ray"),
        (["train", "spec.yaml", "--local", "--run", "a/b"], 2, "run: got 'a/b'"),
        (["train", "spec.yaml", "--local", f"initial_weights={GONE}"], 2, "initial_weights: there is no file"),
        (["train", "nowhere.yaml", "--local"], 2, "nowhere.yaml"),
        (["train", ".", "--local"], 2, "spec: "),
        (["train", "spec.yaml", "--local", "lr"], 2, "'lr'"),
        (["lr-find", "spec.yaml", "--lowest", "2", "--highest", "1"], 2, "lr-find: got rates 2 … 1"),
        (["lr-find", "spec.yaml", "job.use=theirs:Wrongs"], 2, "did you mean 'Wrong'?"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_command(words: list[str], wanted: int, told: str, call: Call, tmp_path: Path) -> None:
    with quick():
        code, out, err = call(*words)
    line = only_line(err)
    assert (code, out, left(tmp_path)) == (wanted, "", []), line
    assert told in line, line


def test_a_param_that_a_resumed_run_cannot_have(call: Call) -> None:
    """One that the job does not know is told as at a start; one that it knows, as a change of the run, whose default it had."""
    source = "class Wrong(Right):\n  class Params(lockstep.Params):\n    width: int = 4"
    _, out, _ = call("train", "spec.yaml", "--local", "--json", source=source, length={"steps": 1})
    resume = ["resume", "--local", "--uri", "off", json.loads(out)["run_id"]]
    for override, told in (
        ("job.params.nope=1", "job.params.nope: unknown key; known here: width"),
        ("job.params.width=5", "resume: job.params.width is 4 in run "),
    ):
        code, _, err = call(*resume, override, source=source, length={"steps": 1})
        assert (code, only_line(err).startswith(f"lockstep: {told}")) == (2, True), err


@pytest.mark.scenario
def test_a_step_that_is_not_there(call: Call, tmp_path: Path) -> None:
    """Of a finished run as well; and a resume or a fork says where it starts."""
    _, out, _ = call("train", "spec.yaml", "--local", "--json", checkpoint={"every": {"steps": 1}})
    run = json.loads(out)["run_id"]
    resume = ["resume", "--local", "--uri", "off", run]
    for more in (["--from-step", "7"], ["--fork", "--from-step", "7"]):
        code, _, err = call(*resume, *more)
        assert (code, only_line(err)) == (
            2,
            f"lockstep: resume: run {run} has no checkpoint of step 7; it has 1, 2",
        )
    code, _, err = call(*resume, "--from-step", "1")
    assert code == 0 and "is finished; nothing is left to do" in err
    code, _, err = call(*resume, "--fork", "--from-step", "1", "seed=5")
    assert code == 0 and f"a new run starts from step 1 of run {run}" in err
    folder = tmp_path / "runs" / run
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**told, "status": "FAILED"}))
    code, _, err = call(*resume)
    assert code == 0 and f"run {run} goes on from its newest good checkpoint (the newest is of step 2)" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train"], "Missing argument 'SPEC'"),
        (["trian"], "No such command 'trian'"),
        (["train", "spec.yaml", "--locl"], "No such option: --locl"),
        (["resume", "x", "--from-step", "0"], "Invalid value for '--from-step'"),
    ],
)
def test_a_mistake_in_the_usage(words: list[str], told: str, tmp_path: Path) -> None:
    """The command itself: exit code 2, nothing on standard output."""
    done = subprocess.run(
        command(*words), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.scenario
def test_lr_find_starts_over_with_fixed_string_hashing() -> None:
    """As --local does: nobody has to set PYTHONHASHSEED by hand."""
    words = ["lr-find", "jobs/digits/train.yaml", "--steps", "10", "--json", "job.params.width=4"]
    words += ["job.use=tests.untraced_jobs:UntracedDigits"]
    done = subprocess.run(
        command(*words), cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rates"]) == 10
