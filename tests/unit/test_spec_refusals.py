"""What a spec can be refused for before its fields are looked at is told as the problem that it is. test_spec.py has the lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.parsing import MOST_YAML_BYTES
from lockstep.spec import problems
from lockstep.spec.loading import load_spec
from lockstep.spec.schedules import WarmupStableDecay
from lockstep.spec.sweep import load_sweep
from tests.raised import Refusal, check_refusal, each_refusal

PLAIN = {"job": {"use": "a:B"}}


def file(content: bytes | str) -> Callable[[Path], Any]:
    """Reads a spec with this content."""

    def read(folder: Path) -> Any:
        path = folder / "train.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_spec(path)

    return read


def given(*overrides: str) -> Callable[[Path], Any]:
    return lambda _: load_spec(PLAIN, overrides)


CALLS: list[Refusal] = [
    (file(""), problems.EMPTY, {"file": re.compile("train.yaml$")}),
    (file("- 1"), problems.NO_MAPPING, {"got": "[1]"}),
    (file("a: b: c"), problems.NOT_YAML, {"what": re.compile("train.yaml")}),
    (file(b"job: \xff"), problems.NOT_TEXT, {"got": "invalid start byte at byte 5"}),
    (file(" " * (MOST_YAML_BYTES + 1)), problems.TOO_LARGE, {"file": re.compile("train.yaml$")}),
    (lambda here: load_spec(here / "tain.yaml"), problems.MISSING, {"got": "No such file or directory"}),
    (load_spec, problems.UNREADABLE, {"got": "Is a directory"}),
    (given('record.folder="/tmp/x/\\ud800"'), problems.HALF_CHARACTER, {"field": "record.folder", "half": "\\ud800"}),
    (given('job.params.words=["a", "\\udfff"]'), problems.HALF_CHARACTER, {"field": "job.params.words.1"}),
    (file('job: {use: "a:B", params: {"\\ud800": 1}}'), problems.HALF_CHARACTER, {"field": "job.params.'\\ud800'"}),
    (lambda _: load_spec(PLAIN, uri="http://x/\ud800"), problems.HALF_CHARACTER, {"field": "record.uri"}),
    (
        lambda _: load_sweep({"spec": PLAIN, "space": {"seed": {"grid": [1]}}, "name": "\ud800"}),
        problems.HALF_CHARACTER,
        {"field": "name"},
    ),
    (given("seed"), problems.NO_OVERRIDE, {"got": "seed"}),
    (given("job.use.low=3"), problems.NO_FIELDS, {"field": "job.use.low", "section": "job.use"}),
    (given(f"checkpoint.storage=/runs/{256 * 'a'}"), problems.LONG_PATH, {"got": re.compile("^'/runs/aaa"), "bytes": 256}),
    (given(f"record.folder={128 * 'ä'}"), problems.LONG_PATH, {"got": re.compile("^'ä"), "bytes": 256}),
    (given("checkpoint.storage=~nobody-is-called-so/runs"), problems.NO_HOME, {"got": re.compile("^'~nobody")}),
    (given("checkpoint.storage=file://"), problems.STORAGE_EMPTY, {"got": "file://"}),
    (given("checkpoint.storage=s3:/bucket"), problems.STORAGE_SLASH, {"wanted": "two, s3://bucket"}),
    (given("checkpoint.storage=s3://bucket//a/../b"), problems.STORAGE_KEY, {"remedy": "write s3://bucket/a/b"}),
    (given("checkpoint.storage=s3://bucket/a%2F..%2Fb"), problems.STORAGE_KEY, {"remedy": "write s3://bucket/a/b"}),
    (given("checkpoint.storage=s3://bucket/a#b"), problems.STORAGE_KEY, {"remedy": "write %23 for #"}),
    (given("checkpoint.storage='s3://bucket/a b'"), problems.STORAGE_KEY, {"remedy": "write %20 for it"}),
    (given("checkpoint.storage=file://there/runs"), problems.STORAGE_HOST, {"host": "there"}),
    (given("checkpoint.storage='s3://[bucket'"), problems.STORAGE_NO_URI, {"got": "'s3://[bucket'"}),
    (given("record.uri='http://[::1'"), problems.RECORD_NO_URI, {"got": "http://[::1"}),
    (given("record.uri='postgresql://me:secret@[::1/db'"), problems.RECORD_NO_URI, {"got": "postgresql://***@[::1/db"}),
    (given("record.uri=http://x:99999999"), problems.RECORD_NO_URI, {"reason": re.compile("port")}),
    (given("record.uri=http://x:0"), problems.RECORD_NO_URI, {"reason": re.compile("port")}),
    (given("record.uri=http://me:sec/ret@x"), problems.RECORD_NO_URI, {"got": "http://***@x"}),
    (given("record.uri=http://"), problems.RECORD_NO_URI, {"reason": "it names no host"}),
    (lambda _: load_spec(PLAIN, uri="http://x:99999999"), problems.RECORD_NO_URI, {"got": "http://x:99999999"}),
    (given("record.folder=s3://bucket/runs"), problems.RECORD_FOLDER, {}),
    (
        lambda _: WarmupStableDecay(warmup_steps=7, decay_steps=4).check_length(10),
        problems.DECAY_STEPS,
        {"got": 4, "warmup": 7, "total": 10},
    ),
    (
        lambda _: load_sweep(
            {"spec": PLAIN, "space": {"batch.micro": {"grid": [2, 4]}}}
        ).trial({"batch.micro": 3}),
        problems.SPACE,
        {"got": "batch.micro=3"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "uri",
    [
        "https://me:secret@[::1]:5000/mlflow",
        "postgresql://me:sec/ret@host:5432/db",
        "databricks://profile:x",
        "off",
    ],
)
def test_the_uri_of_a_store_stays_as_it_is(uri: str) -> None:
    assert load_spec(PLAIN, uri=uri).record.uri == uri


@each_refusal(CALLS)
def test_what_is_no_spec_is_refused_by_name(refusal: Refusal, tmp_path: Path) -> None:
    check_refusal(refusal, tmp_path)
