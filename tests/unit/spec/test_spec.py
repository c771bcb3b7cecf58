"""Reading a spec: what is accepted, what a mistake is told (G7), what is made absolute."""

from __future__ import annotations

import json
from pathlib import Path
from re import escape
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SpecError
from lockstep.spec import problems
from lockstep.spec.batch import Batch
from lockstep.spec.document import COUNTS
from lockstep.spec.fields import Every, JobSpec, Length, Spec
from lockstep.spec.loading import load_spec, validate
from lockstep.spec.locations import RECORD_OFF
from lockstep.spec.messages import sections_of, shown
from lockstep.spec.optimizers import SGD
from lockstep.spec.schedules import StepDecay
from tests.raised import raises

JOB = {"job": {"use": "jobs.digits.job:Digits"}}


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def read(text: str, *overrides: str, name: str = "train.yaml") -> Spec:
    Path(name).write_text(text, encoding="utf-8")
    return load_spec(name, overrides)


def with_job(text: str, *overrides: str) -> Spec:
    return read(f'job: {{use: "jobs.digits.job:Digits"}}\n{text}\n', *overrides)


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        read(text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    return message


def refusal_with_job(text: str, *overrides: str) -> str:
    return refusal(f'job: {{use: "jobs.digits.job:Digits"}}\n{text}\n', *overrides)


# --- what is accepted -------------------------------------------------------------------------------------


def test_the_shortest_spec_names_a_job_and_nothing_else() -> None:
    spec = with_job("")
    assert (spec.seed, spec.length.epochs, spec.length.steps) == (0, 1, None)
    assert (spec.batch.global_, spec.batch.micro, spec.batch.micro_batches) == (64, 8, 8)
    assert (spec.optimizer.name, spec.schedule.name, spec.precision) == ("adamw", "constant", "fp32")
    assert (spec.data.drop_last, spec.determinism, spec.reduction, spec.threads) == (
        True,
        "strict",
        "exact",
        1,
    )
    assert (spec.workers.min, spec.workers.max, spec.clip_norm, spec.early_stop) == (1, 1, None, None)


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[3].glob("jobs/*/train.yaml")), ids=lambda p: p.parent.name
)
def test_the_specs_of_the_jobs_in_this_repository_are_valid(path: Path) -> None:
    load_spec(path)


@given(st.integers(1, 4096))
def test_default_micro_is_an_eighth_of_the_global_batch_where_that_divides(size: int) -> None:
    batch = Batch(global_=size)
    assert size % batch.micro == 0
    assert batch.micro_batches == max(parts for parts in range(1, 9) if size % parts == 0)


def test_null_micro_asks_for_the_default() -> None:
    assert with_job("batch: {global: 24, micro: null}").batch.micro == 3
    assert with_job("batch: {global: 64, micro: 16}", "batch.micro=null").batch.micro == 8


def test_more_workers_at_least_means_more_workers_at_most_unless_said() -> None:
    assert with_job("workers: {min: 3}").workers.max == 3
    assert with_job("workers: {min: 3, max: 5}").workers.max == 5


def test_kinds_of_optimizer_and_schedule_are_told_apart_by_name() -> None:
    spec = with_job(
        "optimizer: {name: sgd, momentum: 0.9, nesterov: true}\nschedule: {name: step, every: 10}"
    )
    assert spec.optimizer == SGD(momentum=0.9, nesterov=True)
    assert spec.schedule == StepDecay(every=10)


def test_a_spec_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        with_job("").seed = 3  # type: ignore[misc]


def test_a_spec_can_be_built_in_python() -> None:
    built = Spec(job=JobSpec(use="jobs.digits.job:Digits"), batch=Batch(global_=128))
    assert built.batch == Batch(global_=128, micro=16)
    assert load_spec(built.document()).batch == built.batch


def test_python_mappings_are_read_like_files_and_left_as_they_were() -> None:
    document: dict[str, Any] = {**JOB, "optimizer": {"lr": 0.1, "betas": (0.8, 0.9)}}
    spec = load_spec(document, ["optimizer.lr=0.2", "workers.max=2"])
    assert (spec.optimizer.lr, spec.workers.max) == (0.2, 2)
    assert document == {**JOB, "optimizer": {"lr": 0.1, "betas": (0.8, 0.9)}}


# --- there and back ---------------------------------------------------------------------------------------

ROUND_TRIPS = [
    "",
    "name: some name\nseed: 17\nlength: {steps: 5}\nbatch: {global: 12, micro: 4}",
    "optimizer: {name: adam, lr: 1, betas: [0, 0.5]}\nschedule: {name: cosine, final: 1e-2}",
    "optimizer: {name: sgd, momentum: 0.9}\nschedule: {name: step, every: 3, gamma: 0.5}",
    "workers: {min: 2, max: 4, cpus_each: 2, gpus_each: 1}\nclip_norm: 1\nrecord: {uri: off}",
    "evaluate: {every: {steps: 7}}\nearly_stop: {patience: 2}\ninitial_weights: weights.safetensors",
    "data: {shuffle: none, drop_last: false}\nrecord: {uri: 'http://localhost:5000', experiment: '1e-3 off'}",
]


@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_document_of_a_spec_reads_back_as_the_same_spec(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """G6: what is recorded of a run is enough to start it again, from anywhere, whatever the environment says."""
    spec = with_job(text)
    document = spec.document()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://another:5000")
    assert load_spec(document) == spec
    assert json.dumps(load_spec(document).document()) == json.dumps(
        document
    )  # 1 and 1.0 have different digests
    assert load_spec(json.loads(json.dumps(document))) == spec
    assert read(yaml.safe_dump(document)) == spec


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.scenario
@given(st.dictionaries(st.text(), plain, max_size=4))
def test_params_of_plain_data_survive_the_way_through_json(params: dict[str, Any]) -> None:
    spec = validate({"job": {"use": "a:B", "params": params}})
    assert validate(json.loads(json.dumps(spec.document()))) == spec


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), float("inf"), Path("x"), {3}, [b"x"]])
def test_params_that_would_not_come_back_from_a_record_are_refused(value: Any) -> None:
    with pytest.raises(SpecError, match=r"^job\.params\.width: got .*, wanted plain data: "):
        load_spec({"job": {"use": "a:B", "params": {"width": value}}})


# --- plain words of YAML ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1e-3", 0.001),
        ("1.0e-3", 0.001),
        ("+.5", 0.5),
        ("-1E3", -1000.0),
        ("10_000", 10000),
        ("0x10", 16),
        ("-7", -7),
        ("0", 0),
        ("null", None),
        ("~", None),
        ("", None),
        ("true", True),
        ("False", False),
        ("'3'", "3"),
        ("off", "off"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("e3", "e3"),
        ("<", "<"),
        ("[1, 1e-3, off]", [1, 0.001, "off"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_plain_words_are_read_as_yaml_1_2_reads_them(word: str, value: object) -> None:
    """YAML 1.1 makes a truth value of `off`, ninety of `1:30`, eight of `010` and text of `1e-3`."""
    from_file = read(f"job:\n  use: a:B\n  params:\n    x: {word}\n").job.params["x"]
    from_override = read("job: {use: a:B}", f"job.params.x={word}").job.params["x"]
    assert (from_file, type(from_file)) == (value, type(value))
    assert (from_override, type(from_override)) == (value, type(value))


def test_merge_keys_still_work() -> None:
    spec = read("job: {use: a:B, params: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}}}")
    assert spec.job.params["b"] == {"x": 1, "y": 3}


# --- what a mistake is told -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "spec: 'train.yaml' is empty; name at least a job: {use: \"package.module:Class\"}"),
        (
            "# only a comment",
            "spec: 'train.yaml' is empty; name at least a job: {use: \"package.module:Class\"}",
        ),
        ("- 1\n- 2", "spec: 'train.yaml' holds [1, 2], wanted a mapping of fields"),
        ("digits", "spec: 'train.yaml' holds 'digits', wanted a mapping of fields"),
        (
            "seed: 1\nname: a: b",
            "spec: 'train.yaml' is not YAML: line 2, mapping values are not allowed here",
        ),
        ("seed: 1\nseed: 2", "spec: 'train.yaml' is not YAML: line 2, 'seed' is given twice"),
        (
            "x: !!python/name:os.system",
            "spec: 'train.yaml' is not YAML: line 1, could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os.system'",
        ),
        (
            "seed: 1\n---\nseed: 2",
            "spec: 'train.yaml' is not YAML: line 2, expected a single document in the stream, but found another document",
        ),
        ("seed: !!int x", "spec: 'train.yaml' is not YAML: line 1, 'x' is no int"),
        ("compile: !!bool ja", "spec: 'train.yaml' is not YAML: line 1, 'ja' is no bool"),
        ("seed: !!int ''", "spec: 'train.yaml' is not YAML: line 1, '' is no int"),
        ("name: !!timestamp soon", "spec: 'train.yaml' is not YAML: line 1, 'soon' is no timestamp"),
        (
            "\x01",
            "spec: 'train.yaml' is not YAML: unacceptable character #x0001: special characters are not allowed",
        ),
        ('name: "a\\0"', "spec: 'train.yaml' is not YAML: line 1, 'a\\x00' has a null character"),
        (
            "job: " + 2000 * "[",
            "spec: 'train.yaml' is not YAML: line 1, it is nested too deep, wanted at most 128 levels",
        ),
        (
            "job: {use: a:B}\ndata: {without: 1-99999999999999999999}",
            "data.without: got '1-99999999999999999999', wanted numbers of samples below 4611686018427387904",
        ),
        ("{}", 'job: missing; give one, such as job: {use: "package.module:Class"}'),
        ("job: {}", 'job.use: missing; give one, such as use: "package.module:Class"'),
        ("job:", "job: got null, wanted a mapping of fields: use, params"),
        ("job: a.b:C", "job: got 'a.b:C', wanted a mapping of fields: use, params"),
        ("job: {use: 3}", "job.use: got 3, wanted text; put it in quotes"),
        ("job: {use: a:B, params: [1]}", "job.params: got [1], wanted a mapping of fields"),
        ("job: {use: a:B, params: {3: 1}}", "job.params.3: got 3, wanted text; put it in quotes"),
    ],
)
def test_a_spec_that_cannot_be_read_is_told_where(text: str, message: str) -> None:
    assert refusal(text) == message


def test_a_file_that_is_missing_or_no_text_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"job: \xff")
    for name, reason in [
        (
            "zzz.yaml",
            "cannot read 'zzz.yaml': No such file or directory; name another file, or have `lockstep init NAME` write one with its job",
        ),
        (".", "cannot read '.': Is a directory"),
        ("binary.yaml", "'binary.yaml' is not text in UTF-8: invalid start byte at byte 5"),
    ]:
        with pytest.raises(SpecError) as caught:
            load_spec(name)
        assert str(caught.value) == f"spec: {reason}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimzer: {}", "optimzer: unknown key; did you mean 'optimizer'?"),
        ("lr: 0.1", "lr: unknown key; did you mean 'optimizer.lr'?"),
        ("epochs: 3", "epochs: unknown key; did you mean 'length.epochs'?"),
        ("5: x", "5: got 5, wanted text for a key"),
        ("batch: {glob: 3}", "batch.glob: unknown key; did you mean 'global'?"),
        ("batch: {global_: 3}", "batch.global_: unknown key; did you mean 'global'?"),
        ("length: {epoch: 3}", "length.epoch: unknown key; did you mean 'epochs'?"),
        ("evaluate: {every: {step: 3}}", "evaluate.every.step: unknown key; did you mean 'steps'?"),
        ("evaluate: {steps: 3}", "evaluate.steps: unknown key; did you mean 'every.steps'?"),
        (
            "zzz: 3",
            "zzz: unknown key; known here: activation_checkpointing, alert, batch, checkpoint, clip_norm, compile, data, determinism, early_stop, "
            "ema, evaluate, faults, fork, initial_weights, job, length, name, optimizer, precision, record, reduction, rehearsal, "
            "schedule, seed, sharding, threads, workers",
        ),
        ("recheck: 0.1", "recheck: unknown key; did you mean 'determinism.recheck'?"),
        (
            "data: {zzz: 3}",
            "data.zzz: unknown key; known here: drop_last, group, loader_processes, shuffle, window, without",
        ),
        ("optimizer: {weight_deca: 3}", "optimizer.weight_deca: unknown key; did you mean 'weight_decay'?"),
        ("optimizer: {name: sgd, momentun: 1}", "optimizer.momentun: unknown key; did you mean 'momentum'?"),
        ("schedule: {name: cosine, warmup: 1}", "schedule.warmup: unknown key; did you mean 'warmup_steps'?"),
        (
            "schedule: {name: step, step: 3}",
            "schedule.step: unknown key; known here: every, gamma, name, warmup_steps",
        ),
    ],
)
def test_an_unknown_key_is_told_the_nearest_real_one(text: str, message: str) -> None:
    assert refusal_with_job(text) == message


def test_a_misspelt_key_is_told_before_the_key_that_is_missing_for_it() -> None:
    assert refusal("jobb: {use: a:B}") == "jobb: unknown key; did you mean 'job'?"
    assert refusal("job: {usee: a:B}") == "job.usee: unknown key; did you mean 'use'?"


@pytest.mark.parametrize(
    ("text", "key", "kind", "owners"),
    [
        ("optimizer: {name: sgd, betas: [0.9, 0.99]}", "optimizer.betas", "sgd", "'adamw' and 'adam' have"),
        ("optimizer: {name: adam, momentum: 0.9}", "optimizer.momentum", "adam", "'sgd' has"),
        ("optimizer: {momentum: 0.9}", "optimizer.momentum", "adamw", "'sgd' has"),
        ("schedule: {every: 3}", "schedule.every", "constant", "'step' has"),
        (
            "schedule: {name: step, every: 3, final: 0}",
            "schedule.final",
            "step",
            "'linear', 'cosine', 'wsd', 'polynomial' and 'cosine_restarts' have",
        ),
    ],
)
def test_a_key_of_another_kind_is_told_which_kinds_have_it(
    text: str, key: str, kind: str, owners: str
) -> None:
    section = key.partition(".")[0]
    assert refusal_with_job(text) == (
        f"{key}: unknown key where {section}.name is {kind!r}; {owners} it: change {section}.name, "
        f"or leave the key out ({section}={{name: {kind}}} replaces the section)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {lr: abc}", "optimizer.lr: got 'abc', wanted a number"),
        ("optimizer: {lr: '1e-3'}", "optimizer.lr: got '1e-3', wanted a number; remove the quotes"),
        ("optimizer: {lr: true}", "optimizer.lr: got true, wanted a number"),
        ("optimizer: {lr: 0}", "optimizer.lr: got 0, wanted more than 0"),
        ("optimizer: {lr: .inf}", "optimizer.lr: got inf, wanted a finite number"),
        ("optimizer: adamw", "optimizer: got 'adamw', wanted a mapping of fields: name, lr, weight_decay, betas, eps, momentum, nesterov"),
        ("optimizer: {name: lion}", "optimizer.name: got 'lion', wanted 'adamw', 'adam' or 'sgd'"),
        ("optimizer: {name: null}", "optimizer.name: got null, wanted 'adamw', 'adam' or 'sgd'"),
        ("optimizer: {betas: 0.9}", "optimizer.betas: got 0.9, wanted a list"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas: got [0.9], wanted at least 2 values"),
        ("optimizer: {betas: [0, 0, 0]}", "optimizer.betas: got [0, 0, 0], wanted at most 2 values"),
        ("threads: 1025", "threads: got 1025, wanted at most 1024"),
        ("data: {loader_processes: 10000}", "data.loader_processes: got 10000, wanted at most 1024"),
        ("optimizer: {betas: [0.9, x]}", "optimizer.betas.1: got 'x', wanted a number"),
        ("optimizer: {betas: [0.9, 1]}", "optimizer.betas.1: got 1, wanted less than 1"),
        ("optimizer: {name: sgd, nesterov: true}", "optimizer.nesterov: got true, wanted false, or optimizer.momentum above 0"),
        ("schedule: {name: step}", "schedule.every: missing; give one, such as every: 1000"),
        ("seed: '3'", "seed: got '3', wanted a whole number; remove the quotes"),
        ("seed: 1e4", "seed: got 10000.0, wanted a whole number; write 10000"),
        ("seed: 1.5", "seed: got 1.5, wanted a whole number"),
        ("seed: true", "seed: got true, wanted a whole number"),
        ("seed: -1", "seed: got -1, wanted at least 0"),
        ("seed: 9223372036854775808", "seed: got 9223372036854775808, wanted less than 9223372036854775808"),
        ("name: 12", "name: got 12, wanted text; put it in quotes"),
        ("name: true", "name: got true, wanted text; put it in quotes"),
        ("name: a/b", "name: got 'a/b', wanted a name without slashes or control characters"),
        ("name: null", "name: got null, wanted text"),
        ("data: {drop_last: 1}", "data.drop_last: got 1, wanted true or false"),
        ("data: {drop_last: yes}", "data.drop_last: got 'yes', wanted true or false"),
        ("data: {shuffle: null}", "data.shuffle: got null, wanted 'full', 'hashed', 'blocks', 'by_length' or 'none'"),
        ("data: {loader_processes: -1}", "data.loader_processes: got -1, wanted at least 0"),
        ("precision: fp8", "precision: got 'fp8', wanted 'fp32', 'bf16' or 'fp16'"),
        ("activation_checkpointing: 1", "activation_checkpointing: got 1, wanted true or false"),
        ("batch:", "batch: got null, wanted a mapping of fields: global, micro, tokens"),
        ("batch: {global: x}", "batch.global: got 'x', wanted a whole number"),
        ("batch: {global: 0, micro: 4}", "batch.global: got 0, wanted more than 0"),
        ("batch: {global: 8, micro: 0}", "batch.micro: got 0, wanted more than 0"),
        ("workers: {gpus_each: some}", "workers.gpus_each: got 'some', wanted a number or 'auto'"),
        ("workers: {gpus_each: -1}", "workers.gpus_each: got -1, wanted at least 0 or 'auto'"),
        ("workers: {min: x}", "workers.min: got 'x', wanted a whole number"),
        ("evaluate: {every: 5}", "evaluate.every: got 5, wanted a mapping of fields: epochs, steps"),
        ("early_stop: {mode: max}", "early_stop: got {'mode': 'max'}, wanted the name of a metric beside mode=max, such as metric=eval/accuracy: eval/loss falls as the model improves"),
        ("checkpoint: {keep_best: {mode: max}}", "checkpoint.keep_best: got {'mode': 'max'}, wanted the name of a metric beside mode=max, such as metric=eval/accuracy: eval/loss falls as the model improves"),
        ("early_stop: {mode: [min]}", "early_stop.mode: got ['min'], wanted 'min' or 'max'"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_what_is_wanted(text: str, message: str) -> None:
    """Types are strict: no text for a number, no number for text, neither for a truth value."""
    assert refusal_with_job(text) == message


@pytest.mark.parametrize("field", ["length", "evaluate.every"])
@pytest.mark.parametrize("given", ["{}", "{epochs: 2, steps: 3}", "{epochs: null}"])
def test_epochs_and_steps_exclude_each_other_and_one_is_needed(field: str, given: str) -> None:
    text = f"length: {given}" if field == "length" else f"evaluate: {{every: {given}}}"
    assert refusal_with_job(text).startswith(f"{field}: got {{")
    assert refusal_with_job(text).endswith("}, wanted exactly one of epochs and steps")


@pytest.mark.parametrize(
    ("size", "micro", "nearest"), [(256, 48, 32), (256, 100, 128), (12, 5, 4), (8, 9, 8), (7, 3, 1)]
)
def test_a_micro_batch_that_does_not_divide_is_told_the_nearest_that_does(
    size: int, micro: int, nearest: int
) -> None:
    message = refusal_with_job(f"batch: {{global: {size}, micro: {micro}}}")
    assert (
        message
        == f"batch.micro: got {micro}, wanted a divisor of batch.global = {size}; the nearest is {nearest}"
    )


def test_fewest_workers_above_most_workers_is_refused() -> None:
    message = "workers.max: got 2, wanted at least workers.min = 3"
    assert refusal_with_job("workers: {min: 3, max: 2}") == message
    assert refusal_with_job("workers: {min: 3}", "workers.max=2") == message


def test_fewest_workers_above_the_micro_batches_is_refused() -> None:
    assert refusal_with_job("batch: {global: 8, micro: 2}\nworkers: {min: 5}") == (
        "workers.min: got 5, wanted at most the 4 micro-batches of a step, since every worker runs at least one; "
        "lower workers.min or batch.micro"
    )
    assert with_job("batch: {global: 8, micro: 2}\nworkers: {min: 4, max: 9}").workers.max == 9


def test_a_long_or_many_lined_value_is_cut_to_one_line() -> None:
    message = refusal_with_job(f"precision: {'x' * 500}")
    assert len(message) < 150
    assert shown("a\nb") == "'a\\nb'"
    assert shown(type("Odd", (), {"__repr__": lambda _: "two\n lines"})()) == "two lines"


# --- overrides --------------------------------------------------------------------------------------------


def test_determinism_is_a_word_or_a_word_and_a_share() -> None:
    """A spec that asks for no recheck is written as it always was."""
    written = {**JOB, "determinism": "strict"}
    both = load_spec(written, ["determinism.recheck=0.01"])
    assert (both.determinism, both.recheck) == ("strict", 0.01)
    assert both.document()["determinism"] == {"mode": "strict", "recheck": 0.01}
    assert validate(both.document()) == both
    assert load_spec(written).document()["determinism"] == "strict"
    assert load_spec({**JOB, "determinism": {"mode": "fast"}}).determinism == "fast"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("determinism.recheck=2", "determinism.recheck: got 2, wanted a number from 0 to 1"),
        ("determinism.recheck=true", "determinism.recheck: got true, wanted a number from 0 to 1"),
        ("determinism.rechek=0.1", "determinism.rechek: unknown key; did you mean 'recheck'?"),
        ("determinism={mode: fast, recheck: 0.1}", "determinism.recheck: got 0.1 with determinism.mode fast"),
        ("determinism={mode: fat}", "determinism: got 'fat', wanted 'strict' or 'fast'"),
        ("recheck=0.1", "recheck: unknown key"),
    ],
)
def test_a_share_that_cannot_be_rechecked_is_told(override: str, message: str) -> None:
    with pytest.raises(SpecError, match=escape(message)):
        load_spec(JOB, [override])


def test_overrides_are_dotted_and_the_later_one_counts() -> None:
    spec = with_job("optimizer: {lr: 0.5}", "optimizer.lr=1e-3", "workers.max=4", "seed=1", "seed=2")
    assert (spec.optimizer.lr, spec.workers.max, spec.seed) == (0.001, 4, 2)


def test_overrides_create_the_sections_on_their_way() -> None:
    spec = with_job(
        "early_stop: null", "early_stop.patience=3", "evaluate.every.steps=5", "job.params.a.b=[1, 2]"
    )
    assert spec.early_stop is not None
    assert (spec.early_stop.patience, spec.evaluate.every.steps) == (3, 5)
    assert spec.job.params == {"a": {"b": [1, 2]}}


def test_overrides_take_null_lists_and_whole_sections() -> None:
    spec = with_job(
        "clip_norm: 1.0\noptimizer: {lr: 0.5, betas: [0.5, 0.5]}",
        "clip_norm=null",
        "optimizer.betas=[0.9,0.95]",
        "schedule={name: linear, final: 0.1}",
    )
    assert spec.clip_norm is None
    assert spec.optimizer.model_dump()["betas"] == (0.9, 0.95)
    assert spec.schedule.model_dump() == {"name": "linear", "warmup_steps": 0, "final": 0.1}


def test_sections_are_replaced_in_the_order_of_the_overrides() -> None:
    text = "optimizer: {lr: 0.5, weight_decay: 0.3}"
    first = with_job(text, "optimizer.lr=1", "optimizer={name: sgd}", "optimizer.momentum=0.5").optimizer
    assert first == SGD(momentum=0.5)
    assert with_job(text, "optimizer={name: sgd}", "optimizer.lr=1").optimizer == SGD(lr=1.0)


def test_a_value_may_hold_an_equals_sign() -> None:
    assert with_job("", "record.uri=postgresql://me@host/db?a=b").record.uri == "postgresql://me@host/db?a=b"


def test_an_override_of_steps_takes_the_place_of_epochs() -> None:
    spec = with_job(
        "length: {epochs: 3}\nevaluate: {every: {steps: 4}}", "length.steps=9", "evaluate.every.epochs=2"
    )
    assert (spec.length.epochs, spec.length.steps) == (None, 9)
    assert (spec.evaluate.every.epochs, spec.evaluate.every.steps) == (2, None)


def test_overrides_of_both_epochs_and_steps_contradict_each_other() -> None:
    message = refusal_with_job("length: {epochs: 3}", "length.steps=9", "length.epochs=2")
    assert message == "length: got {'epochs': 2, 'steps': 9}, wanted exactly one of epochs and steps"


def test_epochs_and_steps_of_a_job_are_its_own_affair() -> None:
    spec = read("job: {use: a:B, params: {epochs: 1}}", "job.params.steps=2")
    assert spec.job.params == {"epochs": 1, "steps": 2}


def test_an_override_reaches_one_of_the_places_that_share_an_anchor() -> None:
    """The identity of the run follows from the other one."""
    spec = with_job(
        "evaluate: {every: &often {steps: 100}}\ncheckpoint: {every: *often}", "checkpoint.every.steps=10"
    )
    assert (spec.checkpoint.every.steps, spec.evaluate.every.steps) == (10, 100)  # type: ignore[union-attr]


def test_an_override_reaches_one_of_the_places_of_a_mapping_in_python() -> None:
    often = {"steps": 100}
    given = {"job": {"use": "a:B"}, "evaluate": {"every": often}, "checkpoint": {"every": often}}
    spec = load_spec(given, ["checkpoint.every.epochs=2"])
    assert (spec.evaluate.every.steps, often) == (100, {"steps": 100})


def test_a_larger_global_batch_keeps_the_micro_batch_of_the_file() -> None:
    batch = with_job("batch: {global: 64, micro: 16}", "batch.global=256").batch
    assert (batch.global_, batch.micro, batch.micro_batches) == (256, 16, 16)


def test_a_global_batch_that_the_micro_batch_of_the_file_does_not_divide_is_refused() -> None:
    message = refusal_with_job("batch: {global: 64, micro: 16}", "batch.global=40")
    assert message == "batch.micro: got 16, wanted a divisor of batch.global = 40; the nearest is 20"
    assert with_job("batch: {global: 64, micro: 16}", "batch.global=40", "batch.micro=null").batch.micro == 5


def test_another_optimizer_keeps_the_keys_that_both_have() -> None:
    spec = with_job("optimizer: {name: adamw, lr: 0.5, weight_decay: 0.3}", "optimizer.name=sgd")
    assert spec.optimizer == SGD(lr=0.5, weight_decay=0.3)


def test_another_optimizer_is_refused_while_the_file_has_keys_of_the_first_alone() -> None:
    text = "optimizer: {name: adamw, lr: 0.5, betas: [0.9, 0.99]}"
    message = refusal_with_job(text, "optimizer.name=sgd")
    assert message.startswith(
        "optimizer.betas: unknown key where optimizer.name is 'sgd'; 'adamw' and 'adam' have it"
    )
    assert with_job(text, "optimizer={name: sgd}").optimizer == SGD()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override: got 'seed', wanted key=value such as optimizer.lr=1e-3"),
        ("=3", "override: got '=3', wanted key=value such as optimizer.lr=1e-3"),
        ("optimizer..lr=3", "override: got 'optimizer..lr=3', wanted key=value such as optimizer.lr=1e-3"),
        ("seed.low=3", "seed.low: seed is 17 and has no fields; set seed itself"),
        ("optimizer.betas.0=1", "optimizer.betas.0: optimizer.betas is [0.8, 0.9] and has no fields; set optimizer.betas itself"),
        ("optimizer.betas=[1", "optimizer.betas: '[1' is not YAML: line 1, while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"),
        ("optimzer.lr=3", "optimzer: unknown key; did you mean 'optimizer'?"),
        ("optimizer.lrr=3", "optimizer.lrr: unknown key; did you mean 'lr'?"),
        ("lr=3", "lr: unknown key; did you mean 'optimizer.lr'?"),
        ("optimizer.lr=fast", "optimizer.lr: got 'fast', wanted a number"),
        ("optimizer.lr=", "optimizer.lr: got null, wanted a number"),
        ("length.epochs=null", "length: got {'epochs': None}, wanted exactly one of epochs and steps"),
        ("record.folder=s3://bucket/runs", "record.folder: got 's3://bucket/runs', wanted a folder of the file system; an object store is for checkpoint.storage"),
        ("checkpoint.storage=file://runs/night", "checkpoint.storage: got 'file://runs/night', a URI of another machine; wanted a path such as runs/night, or file:///… with a path from the root on"),
        ("checkpoint.storage=file://runs", "checkpoint.storage: got 'file://runs', a URI of another machine; wanted a path such as runs, or file:///… with a path from the root on"),
        ("checkpoint.storage=s3:/bucket/runs", "checkpoint.storage: got 's3:/bucket/runs', with one slash after the colon; wanted two, s3://bucket/runs"),
        ("checkpoint.storage=file:/data/runs", "checkpoint.storage: got 'file:/data/runs', with one slash after the colon; wanted a path such as /data/runs"),
        ("checkpoint.storage=''", "checkpoint.storage: got '', wanted a path or a URI"),
        ("checkpoint.storage=file://", "checkpoint.storage: got 'file://', wanted a path or a URI"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_told_what_is_wanted(override: str, message: str) -> None:
    text = "seed: 17\nlength: {epochs: 3}\noptimizer: {betas: [0.8, 0.9]}"
    assert refusal_with_job(text, override) == message


# --- names, paths and URIs --------------------------------------------------------------------------------


def test_name_defaults_to_the_file_or_to_the_class() -> None:
    assert read("job: {use: a.b:Digits}", name="wide.yaml").name == "wide"
    assert read("job: {use: a.b:Digits}", name="train.yaml").name == "digits"
    assert load_spec({"job": {"use": "a.b:Digits"}}).name == "digits"
    assert read("job: {use: a.b:Digits}\nname: mine", name="wide.yaml").name == "mine"


def test_experiment_defaults_to_the_name() -> None:
    assert with_job("name: mine").record.experiment == "mine"
    assert with_job("name: mine\nrecord: {experiment: ours}").record.experiment == "ours"


def test_relative_paths_become_absolute_when_the_spec_is_read(working_directory: Path) -> None:
    spec = with_job("initial_weights: weights/last\ncheckpoint: {storage: ./some/runs}")
    assert spec.initial_weights == f"{working_directory}/weights/last"
    assert spec.checkpoint.storage == f"{working_directory}/some/runs"
    assert with_job("").checkpoint.storage == f"{working_directory}/runs"


def test_paths_that_mean_the_same_everywhere_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert with_job("checkpoint: {storage: /data/runs}").checkpoint.storage == "/data/runs"
    assert with_job("checkpoint: {storage: 's3://bucket/runs'}").checkpoint.storage == "s3://bucket/runs"
    assert with_job("checkpoint: {storage: ~/runs}").checkpoint.storage == "/home/me/runs"
    spec = with_job("checkpoint: {storage: 'file:///data/my%20runs'}")
    assert (spec.checkpoint.storage, spec.record.folder) == ("/data/my runs", "/data/my runs")


def test_initial_weights_may_name_a_run(working_directory: Path) -> None:
    run_id = "0123456789abcdef" * 2
    assert with_job(f"initial_weights: '{run_id}'").initial_weights == run_id
    (working_directory / run_id).touch()
    assert with_job(f"initial_weights: '{run_id}'").initial_weights == f"{working_directory}/{run_id}"


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ("sqlite:///mlflow.db", "sqlite:///{cwd}/mlflow.db"),
        ("sqlite:///./some/mlflow.db", "sqlite:///{cwd}/some/mlflow.db"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("sqlite+pysqlite:///mlflow.db", "sqlite+pysqlite:///{cwd}/mlflow.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("sqlite://", "sqlite://"),
        ("./mlruns", "{cwd}/mlruns"),
        ("/data/mlruns", "/data/mlruns"),
        ("file:mlruns", "file://{cwd}/mlruns"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("http://tracking:5000", "http://tracking:5000"),
        ("postgresql://me:secret@host/db", "postgresql://me:secret@host/db"),
        ("databricks", "databricks"),
        ("databricks://profile", "databricks://profile"),
        (RECORD_OFF, RECORD_OFF),
    ],
)
def test_tracking_uris_mean_the_same_from_every_working_directory(
    given: str, resolved: str, working_directory: Path
) -> None:
    assert load_spec({**JOB, "record": {"uri": given}}).record.uri == resolved.format(cwd=working_directory)


def test_the_word_off_turns_the_record_off_in_a_file_and_in_an_override() -> None:
    assert with_job("record: {uri: off}").record.uri == RECORD_OFF
    assert with_job("", "record.uri=off").record.uri == RECORD_OFF


def test_tracking_uri_is_the_argument_else_the_spec_else_the_environment_else_a_file_here(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = {**JOB, "record": {"uri": "http://spec"}}
    assert load_spec(JOB).record.uri == f"sqlite:///{working_directory}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")
    assert load_spec(JOB).record.uri == "http://environment"
    assert load_spec(recorded).record.uri == "http://spec"
    assert load_spec(recorded, uri="http://argument").record.uri == "http://argument"
    assert load_spec(recorded, ["record.uri=http://override"]).record.uri == "http://override"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert load_spec(JOB, uri="").record.uri == f"sqlite:///{working_directory}/mlflow.db"


def test_an_override_knows_every_section_that_counts_in_one_unit() -> None:
    def counted(section: type[Any], above: str = "") -> set[str]:
        found = set[str]()
        for name, field in section.model_fields.items():
            for kind in sections_of(field.annotation):
                path = f"{above}{name}"
                found |= {path} if issubclass(kind, Length | Every) else counted(kind, f"{path}.")
        return found

    assert counted(Spec) == set(COUNTS)


def test_sharding_is_a_mode_or_a_mapping() -> None:
    """A spec that says nothing of units is written as it always was."""
    full = load_spec({**JOB, "sharding": "full"}, ["sharding.units=[layers.*]"])
    assert (full.sharding.mode, full.sharding.units, full.sharding.prefetch) == ("full", ("layers.*",), 1)
    assert full.document()["sharding"] == {"mode": "full", "units": ["layers.*"]}
    assert load_spec(full.document()) == full
    assert load_spec({**JOB, "sharding": {"mode": "full", "prefetch": 1}}).document()["sharding"] == "full"
    offloaded = load_spec({**JOB, "sharding": "full"}, ["sharding.offload=true"])
    assert offloaded.document()["sharding"] == {"mode": "full", "offload": True}
    assert load_spec(offloaded.document()) == offloaded


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sharding=ful", "sharding: got 'ful', wanted 'none', 'optimizer' or 'full'"),
        ("sharding={mode: full, unit: [a]}", "sharding.unit: unknown key; did you mean 'units'?"),
        ("sharding={mode: full, units: []}", "sharding.units: got [], wanted names of modules, such as ['layers.*']"),
        ("sharding={mode: full, prefetch: -1}", "sharding.prefetch: got -1, wanted at least 0"),
        ("sharding.prefetch=0", "sharding.prefetch: got 0 with sharding.mode none, which gathers no units; set sharding.mode=full"),
        ("sharding={mode: optimizer, units: [a]}", "sharding.units: got ['a'] with sharding.mode optimizer"),
        ("sharding.offload=true", "sharding.offload: got true with sharding.mode none, which gathers no units; set sharding.mode=full, or leave it out"),
        ("sharding={mode: full, offload: 1}", "sharding.offload: got 1, wanted true or false"),
    ],
)  # fmt: skip
def test_units_that_cannot_be_are_told(override: str, message: str) -> None:
    with pytest.raises(SpecError) as refusal:
        load_spec(JOB, [override])
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(("sharded", "sharding"), [(True, "optimizer"), (False, "none")])
def test_a_sharded_optimizer_as_0_1_has_it_is_read_as_sharding(sharded: bool, sharding: str) -> None:
    spec = load_spec({"job": {"use": "a:B"}, "optimizer": {"name": "sgd", "sharded": sharded}})
    assert (spec.sharding.mode, spec.optimizer.name) == (sharding, "sgd")
    assert "sharded" not in spec.document()["optimizer"]


def test_a_recorded_spec_that_lacks_a_secret_is_refused_until_it_is_given() -> None:
    """With the mark as its value it would be another run."""
    text = "job: {use: 'jobs.digits.job:Digits', params: {note: 'x <redacted: GitHub Token>'}}"
    with raises(problems.SECRET_LEFT_OUT, field="job.params.note", got="'x <redacted: GitHub Token>'"):
        read(text)
    assert read(text, "job.params.note=x").job.params == {"note": "x"}
    recorded = {"job": {"use": "jobs.digits.job:Digits", "params": {"note": "<redacted: GitHub Token>"}}}
    assert load_spec(recorded).job.params["note"] == "<redacted: GitHub Token>"
