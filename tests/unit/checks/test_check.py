"""`lockstep check` names each planted fault by the check it belongs to and by no other, and passes every sound job here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from lockstep.checks import check as checking
from lockstep.checks.check import check
from lockstep.checks.findings import Report, as_text
from lockstep.errors import SpecError
from lockstep.spec.loading import load_spec
from tests.in_process import here

JOBS = "tests.faulty_jobs.jobs"


class Fault(NamedTuple):
    """A job, what its spec says beyond the usual, and the check that must find it, with a word of what it says."""

    job: str
    found_by: str
    result: str
    word: str
    spec: Mapping[str, Any] = MappingProxyType({})
    symptom: str = ""
    """A further check that warns of what the fault leads to."""


FAULTS = [
    Fault("NotFinite", "data", "failure", "not finite"),
    Fault("OneSample", "data", "failure", "are equal"),
    Fault("Truncated", "data", "failure", "unexpected end of file", {"data": {"shuffle": "none"}}),
    Fault("LyingBlocks", "shards", "failure", "add up to 300, but it has 256 samples", {"data": {"shuffle": "blocks", "window": 2}}),
    Fault("LyingLength", "data", "failure", "IndexError", {"data": {"shuffle": "none", "drop_last": False}}),
    Fault("Leaking", "leakage", "warning", "evaluation samples are training samples too"),
    Fault("Slow", "loader", "warning", "is fetched in"),
    Fault("UnseededAugmentation", "same bits", "failure", "data"),
    Fault("OwnGenerator", "same bits", "failure", "job.generator"),
    Fault("Clocked", "same bits", "failure", "computed again under one seed"),
    Fault("StaleCache", "same bits", "failure", "job.mean"),
    Fault("WeightOfOne", "labels", "warning", "the sum over 32 labels, and its weight is 4"),
    Fault("LogitsInNll", "labels", "failure", "no log-probabilities"),
    Fault("SoftmaxOverBatch", "labels", "failure", "no log-probabilities", symptom="same bits"),
    Fault("OffByOne", "labels", "failure", "out of range"),
    Fault("SoftmaxTwice", "labels", "failure", "softmax is taken twice"),
    Fault("ProbabilitiesInNll", "labels", "failure", "without their logarithm"),
    Fault("SigmoidTwice", "labels", "warning", "lie between 0 and 1"),
    Fault("MissingClass", "labels", "warning", "class 2 is"),
    Fault("TokensMissing", "labels", "warning", "class 31 is"),
    Fault("SwappedMap", "labels", "warning", "class 0 is"),
    Fault("HeldOutOffByOne", "labels", "failure", "evaluation micro-batch 0"),
    Fault("Sorted", "labels", "warning", "labels of the first step are 0", {"data": {"shuffle": "none"}}),
    Fault("PlusMinusOne", "labels", "failure", "below 0 or above 1"),
    Fault("Stretched", "labels", "failure", "(8, 1) and targets of shape (8,)", symptom="same bits"),
    Fault("StretchedAbsolute", "labels", "failure", "smooth_l1_loss is given outputs of shape (8, 1)", symptom="same bits"),
    Fault("PaddingCounts", "labels", "warning", "padding", symptom="same bits"),
    Fault("Unscaled", "chance", "warning", "guessing one of 4 classes gives 1.386"),
    Fault("Entropy", "model", "failure", "'0.weight' has other values"),
    Fault("Untied", "model", "warning", "'inner.weight' and 'outer.weight'"),
    Fault("Unused", "gradients", "failure", "'further.weight'"),
    Fault("Frozen", "gradients", "failure", "'0.weight'"),
    Fault("Masked", "gradients", "failure", "zero in every element"),
    Fault("DeadUnits", "gradients", "failure", "'0.bias' and 4 more"),
    Fault("Saturated", "gradients", "failure", "'0.bias' and 1 more"),
    Fault("Detached", "gradients", "failure", "no gradient"),
    Fault("InPlace", "gradients", "failure", "inplace"),
    Fault("Underflowing", "gradients", "failure", "'0.bias'", {"precision": "fp16"}),
    Fault("NormOfOne", "loss", "failure", "more than 1 value per channel", {"batch": {"global": 8, "micro": 1}}),
    Fault("LogOfZero", "loss", "failure", "total is nan"),
    Fault("NoDeterministicForm", "loss", "failure", "has no deterministic kernel"),
    Fault("InEvaluationMode", "modes", "warning", "in training"),
    Fault("InTrainingMode", "modes", "failure", "during evaluation"),
    Fault("AlwaysDropping", "modes", "warning", "dropout is called to drop"),
    Fault("AttentionDropping", "modes", "warning", "scaled_dot_product_attention"),
    Fault("MeanLoss", "same bits", "failure", "a mean, wanted the sum"),
    Fault("KeptGraph", "same bits", "warning", "job.losses"),
    Fault("SparseTable", "same bits", "failure", "AdamW takes no sparse gradient"),
    Fault("Accumulating", "evaluation", "failure", "job.right"),
    Fault("ShuffledEvaluation", "evaluation", "failure", "eval_data.generator"),
    Fault("EmptyEvaluation", "evaluation", "failure", "holds no sample"),
    Fault("ForeignParameters", "optimizer", "failure", "is none of the model's"),
    Fault("NormsAlone", "optimizer", "failure", "'1.weight' and 1 more is in no group"),
    Fault("LeftOut", "optimizer", "failure", "is in no group"),
    Fault("Sound", "optimizer", "warning", "of norms", {"length": {"steps": 20_000}, "optimizer": {"lr": 0.01, "weight_decay": 0.02}}),
    Fault("NeverZeroed", "zero_grad", "failure", "is the sum of all gradients of '0.weight'"),
    Fault("MastersNeverZeroed", "zero_grad", "failure", "the optimizer's step adds to the existing gradient"),
    Fault("OwnStepNeverZeroed", "zero_grad", "failure", "after_step adds to the existing gradient of '4.weight'"),
    Fault("Ascending", "overfit", "failure", "it rises"),
    Fault("Standing", "overfit", "failure", "does not fall"),
    Fault("Overflowing", "overfit", "failure", "overflow", {"precision": "fp16"}),
    Fault("Sound", "overfit", "failure", "goes from", {"optimizer": {"name": "sgd", "lr": 1e5}}),
    Fault("Sound", "overfit", "failure", "does not fall", {"clip_norm": 1e-9, "optimizer": {"name": "sgd", "lr": 0.1}}),
    Fault("Sound", "overfit", "warning", "too low", {"optimizer": {"name": "sgd", "lr": 1e-4}}),
    Fault("Sound", "schedule", "warning", "never arrives", {"schedule": {"warmup_steps": 500}}),
    Fault("Sound", "schedule", "warning", "nothing is learnt", {"schedule": {"name": "step", "every": 2, "gamma": 0.1}}),
    Fault("Sound", "storage", "failure", "cannot write", {"checkpoint": {"storage": "/proc/runs"}}),
]  # fmt: skip

SOUND = [
    "Tokens",
    "Sound",
    "SoundRegression",
    "SoundZeroStart",
    "SoundTied",
    "SoundSparse",
    "SoundTable",
    "SoundNested",
    *(
        pytest.param(name, marks=pytest.mark.exact)
        for name in ("SoundNll", "SoundBinary", "SoundMeanOfSequence", "SoundOwnStep")
    ),
]


def checked(folder: Path, job: str, **more: Any) -> Report:
    """The report on a job of this folder; 20 steps of 4 micro-batches."""
    document = {
        "job": {"use": job if ":" in job else f"{JOBS}:{job}"},
        "length": {"steps": 20},
        "batch": {"global": 32, "micro": 8},
        "optimizer": {"lr": 0.01},
        "workers": {"max": 2},
        "record": {"uri": "off"},
        "checkpoint": {"storage": str(folder / "runs")},
        **more,
    }
    return check(load_spec(document))


def found_in(report: Report) -> dict[str, tuple[str, str]]:
    """What is no pass, by the check that found it."""
    return {f.name: (f.result, f.evidence) for f in report.checks if f.result != "pass"}


def each_fault() -> pytest.MarkDecorator:
    """One fault of each check and kind of result by default, all of them where they are asked for."""
    params, met = [], set[tuple[str, str]]()
    for fault in FAULTS:
        further = (fault.found_by, fault.result) in met
        met.add((fault.found_by, fault.result))
        name = f"{fault.job}-{fault.found_by.replace(' ', '-')}-{fault.result}"
        params.append(pytest.param(fault, id=name, marks=[pytest.mark.exact] if further else []))
    return pytest.mark.parametrize("fault", params)


@pytest.mark.every(23)
@pytest.mark.thinned(22)
@each_fault()
def test_a_fault_is_named_by_its_check_and_by_no_other(fault: Fault, tmp_path: Path) -> None:
    report = checked(tmp_path, fault.job, **fault.spec)
    found = found_in(report)
    assert found.keys() == {fault.found_by, fault.symptom} - {""}, as_text(report)
    result, evidence = found[fault.found_by]
    assert result == fault.result
    assert fault.word in evidence
    remedies = [f.remedy for f in report.checks if f.result != "pass"]
    assert all(remedies), remedies
    assert report.passed == (fault.result == "warning")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


FIRST = "0,4,8,12,16,20,24,28"


@pytest.mark.parametrize(
    ("job", "without"),
    [
        ("Sound", "5"),
        pytest.param("Sound", FIRST, marks=pytest.mark.scenario),
        pytest.param("tests.distributed.batch_kinds:Triplets", "0,4,8,12", marks=pytest.mark.scenario),
    ],
    ids=["one", "first", "of a loss over the whole batch"],
)
def test_samples_that_are_left_out_are_not_missing(job: str, without: str, tmp_path: Path) -> None:
    """One, and all of the first micro-batch of the first step."""
    batch = {"global": 16, "micro": 4} if ":" in job else {"global": 32, "micro": 8}
    report = checked(tmp_path, job, batch=batch, data={"shuffle": "none", "without": without})
    assert found_in(report) == {}, as_text(report)


@pytest.mark.every(2)
@pytest.mark.parametrize("job", ["Unsaved", "OwnCritic"])
def test_state_that_no_checkpoint_keeps_fails_the_rehearsal(job: str, tmp_path: Path) -> None:
    """Its second step has other bits after a resume."""
    result, evidence = found_in(checked(tmp_path, job))["same bits"]
    assert result == "failure"
    assert "no checkpoint keeps it" in evidence


@pytest.mark.scenario
@pytest.mark.thinned(8)
@pytest.mark.parametrize("job", SOUND)
def test_a_sound_job_passes_every_check(job: str, tmp_path: Path) -> None:
    report = checked(tmp_path, job)
    assert found_in(report) == {}, as_text(report)
    assert [f.name for f in report.checks] == [one.name for one in checking.CHECKS]
    assert not report.not_reached


COMPARES_OR_FOLLOWS = [
    "Moco",
    "Triplets",
    *(
        pytest.param(name, marks=pytest.mark.exact)
        for name in ("BarlowTwins", "DiceOverABatch", "CriticOverTheBatch", "Dino", "Codebook")
    ),
]


@pytest.mark.scenario
@pytest.mark.thinned(2)
@pytest.mark.parametrize("job", COMPARES_OR_FOLLOWS)
def test_a_micro_batch_of_one_sample_passes_where_a_step_has_more(job: str, tmp_path: Path) -> None:
    """A loss over the whole batch is tried among the rows of a step; a loss that follows what `after_step` moves is judged without it."""
    batch = {"global": 16, "micro": 1}
    report = checked(tmp_path, f"tests.distributed.batch_kinds:{job}", batch=batch, workers={"max": 1})
    assert found_in(report) == {}, as_text(report)


@pytest.mark.scenario
def test_a_wrong_step_fails_beside_a_queue_that_the_loss_follows(tmp_path: Path) -> None:
    report = checked(tmp_path, "AscendingBesideAQueue")
    assert found_in(report)["overfit"][0] == "failure", as_text(report)


@pytest.mark.scenario
def test_the_digits_pass_every_check(tmp_path: Path) -> None:
    spec = load_spec(
        "jobs/digits/train.yaml", ["record.uri=off", f"checkpoint.storage={tmp_path}", "job.params.width=4"]
    )
    report = check(spec)
    assert found_in(report) == {}, as_text(report)


@pytest.mark.exact
def test_a_sign_without_its_estimator_is_named(tmp_path: Path) -> None:
    given = ["record.uri=off", f"checkpoint.storage={tmp_path}", "job.params.straight_through=false"]
    found = found_in(check(load_spec("jobs/practice/straight_through.yaml", given)))
    assert found.keys() == {"gradients"}
    assert "'0.weight'" in found["gradients"][1] or "'0.bias'" in found["gradients"][1]


def test_what_a_failed_check_could_not_give_is_not_reached(tmp_path: Path) -> None:
    report = checked(tmp_path, "Truncated", data={"shuffle": "none"})
    assert {"loss", "gradients", "resume"} <= set(report.not_reached)
    assert "storage" in [f.name for f in report.checks]


def test_a_metric_that_the_job_does_not_give_is_a_wrong_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"early_stop\.metric"):
        checked(tmp_path, "Sound", early_stop={"metric": "eval/accuracy"})


@pytest.mark.scenario
def test_a_database_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("no database, a text of some length\n" * 10)
    found = found_in(checked(tmp_path, "Sound", record={"uri": f"sqlite:///{tmp_path}/notes.db"}))
    assert found.keys() == {"record"}
    assert "file is not a database" in found["record"][1]


def test_a_run_that_does_not_fit_is_told_with_the_micro_batch_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.checks.estimate.available_bytes", lambda device, workers: 608_000)
    report = checked(tmp_path, "Sound", batch={"global": 256, "micro": 256}, workers={"max": 1})
    # So large a batch of so small a model is fetched in about the time that it is computed in: the loader's warning comes and goes.
    (failure,) = [f for f in report.checks if f.result != "pass" and f.name != "loader"]
    assert (failure.name, failure.result) == ("memory", "failure")
    assert "set batch.micro=" in failure.remedy


# --- the command ------------------------------------------------------------------------------------------


@pytest.mark.scenario
def test_the_command_answers_with_a_table_an_object_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spec.yaml").write_text(
        f"job: {{use: '{JOBS}:OffByOne'}}\nbatch: {{global: 32, micro: 8}}\nrecord: {{uri: 'off'}}\n"
    )
    code, out, _ = here(monkeypatch, capfd, tmp_path, "check", "spec.yaml", "--local", "--json")
    told = json.loads(out)
    assert (code, told["passed"]) == (1, False)
    assert {"name", "result", "evidence", "remedy"} == set(told["checks"][0])
    code, out, _ = here(
        monkeypatch, capfd, tmp_path, "check", "spec.yaml", "--local", f"job.use={JOBS}:Sound"
    )
    assert code == 0
    assert "0 warned, 0 failed" in out
    code, out, _ = here(
        monkeypatch, capfd, tmp_path, "check", "spec.yaml", "--local", "optimizer.rl=1", "--json"
    )
    assert (code, json.loads(out)["exit_code"]) == (2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]
