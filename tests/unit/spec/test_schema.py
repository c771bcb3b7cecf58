"""The schemas that editors are given: draft 2020-12, every shipped file fits, and what they refuse is refused by lockstep too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lockstep.errors import SpecError
from lockstep.spec.descriptions import SPEC, SWEEP
from lockstep.spec.document import read_document
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from lockstep.spec.schema import sections, spec_schema, sweep_schema
from lockstep.spec.sweep import SweepSpec, load_sweep
from tests.in_process import here

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "jobs").glob("*/*.yaml"))
JOB = {"use": "jobs.digits.job:Digits"}
SPECS = jsonschema.Draft202012Validator(spec_schema())
SWEEPS = jsonschema.Draft202012Validator(sweep_schema())


def test_both_are_schemas_of_draft_2020_12() -> None:
    for schema in (spec_schema(), sweep_schema()):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_shipped_file_fits_and_not_with_a_wrong_key(file: Path) -> None:
    document = read_document(file)
    validator = SWEEPS if "space" in document else SPECS
    assert [error.message for error in validator.iter_errors(document)] == []
    assert not validator.is_valid({**document, "optimzer": {}})


def test_a_spec_with_all_defaults_filled_in_fits() -> None:
    document = load_spec({"job": JOB}).document()
    assert [error.message for error in SPECS.iter_errors(document)] == []


@pytest.mark.parametrize(
    "section",
    [
        {"batch": {"global": 64}}, {"batch": {"global_": 64}}, {"batch": {"global": 64, "micro": None}},
        {"batch": {"micro": 0}}, {"length": {"epochs": 1, "steps": None}}, {"length": {"epochs": 1, "steps": 2}},
        {"length": {}}, {"checkpoint": {"every": {"seconds": 1.5}}}, {"checkpoint": {"every": None}},
        {"checkpoint": {"every": {"steps": 1, "seconds": 1.5}}}, {"determinism": "fast"},
        {"determinism": {"mode": "strict", "recheck": 0.1}}, {"determinism": {"recheck": 0.1}},
        {"sharding": "full"}, {"sharding": {"mode": "full", "units": ["layers.*"], "prefetch": 0}}, {"sharding": "some"},
        {"sharding": {"mode": "full", "prefetch": -1}}, {"sharding": {"mode": "full", "unit": []}},
        {"determinism": {"recheck": 2}}, {"determinism": {"recheck": 0.1, "seed": 1}}, {"determinism": "loose"},
        {"optimizer": {"lr": 1}}, {"optimizer": {"lr": 1, "momentum": 0.9}},
        {"optimizer": {"name": "sgd", "momentum": 0.9}}, {"optimizer": {"name": "adam", "betas": [0.9]}},
        {"optimizer": {"name": "lion"}}, {"schedule": {"warmup_steps": 3}}, {"schedule": {"name": "step"}},
        {"schedule": {"name": "step", "every": 3}}, {"data": {"without": 3}}, {"data": {"without": "3-7"}},
        {"workers": {"gpus_each": "auto"}}, {"workers": {"gpus_each": "all"}}, {"seed": "3"}, {"seed": -1},
        {"early_stop": None}, {"early_stop": {}}, {"ema": 1}, {"clip_norm": 0}, {"precision": "fp8"}, {"job": {}},
        {"job": {**JOB, "params": {"anything": [1]}}}, {"job": {**JOB, "param": {}}}, {"fork": {"step": 1}},
    ],
    ids=lambda section: re.sub(r"[^\w.]+", "-", json.dumps(section)).strip("-"),
)  # fmt: skip
def test_an_editor_and_lockstep_accept_and_refuse_the_same(section: dict[str, Any]) -> None:
    document = {"job": JOB, **section}
    try:
        load_spec(document)
        accepted = True
    except SpecError:
        accepted = False
    assert SPECS.is_valid(document) == accepted


@pytest.mark.parametrize(
    "part",
    [
        {"scheduler": "asha"}, {"scheduler": "pbt"}, {"scheduler": {"name": "pbt", "every_steps": 5}},
        {"scheduler": {"grace_steps": 5}}, {"scheduler": {"name": "median", "min_trials": 2}}, {"trials": 0},
        {"space": {}}, {"space": {"seed": {"choice": [1, 2], "grid": [1]}}}, {"space": {"seed": {}}},
        {"space": {"seed": {"grid": [1, 2], "when": {"precision": "fp32"}}}}, {"spec": {"job": JOB, "sede": 1}},
        {"budget": {"seconds": 1}}, {"budget": {"hours": 1}}, {"search": "random"}, {"mode": "most"},
    ],
    ids=lambda part: re.sub(r"[^\w.]+", "-", json.dumps(part)).strip("-"),
)  # fmt: skip
def test_of_sweeps_as_well(part: dict[str, Any]) -> None:
    document = {
        "spec": {"job": JOB},
        "space": {"optimizer.lr": {"loguniform": [1e-4, 0.1]}},
        "trials": 2,
        **part,
    }
    try:
        load_sweep(document)
        accepted = True
    except SpecError:
        accepted = False
    assert SWEEPS.is_valid(document) == accepted


def test_a_sweep_may_name_the_file_of_its_spec() -> None:
    document = {"spec": "train.yaml", "space": {"seed": {"grid": [1]}}}
    assert SWEEPS.is_valid(document)
    assert not SWEEPS.is_valid({**document, "spec": 3})


# --- what an editor shows ---------------------------------------------------------------------------------


def properties(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property that a schema declares, with where it stands."""
    if isinstance(schema, list):
        for i, inner in enumerate(schema):
            yield from properties(inner, f"{path}/{i}")
    if not isinstance(schema, dict):
        return
    if "additionalProperties" in schema and isinstance(schema.get("properties"), dict):
        for name, field in schema["properties"].items():
            yield f"{path}/{name}", field
    for name, inner in schema.items():
        if name not in ("default", "examples"):
            yield from properties(inner, f"{path}/{name}")


@pytest.mark.parametrize("schema", [spec_schema(), sweep_schema()], ids=["spec", "sweep"])
def test_every_field_has_a_line_and_no_title_of_pydantics(schema: dict[str, Any]) -> None:
    found = dict(properties(schema))
    assert len(found) > 70
    for where, field in found.items():
        if where.endswith("/mode") and "/determinism/" in where:
            continue  # the word that stands there otherwise, told beside it
        assert field.get("description"), where
        assert "title" not in field, where


def test_no_line_is_of_a_field_that_does_not_exist() -> None:
    for model, lines in ((Spec, SPEC), (SweepSpec, SWEEP)):
        names = {
            prefix + (field.alias or name)
            for section, prefix in sections(model)
            for name, field in section.model_fields.items()
        }
        assert lines.keys() == names


def test_examples_and_defaults_are_such_as_a_file_has_them() -> None:
    schema = spec_schema()
    assert schema["properties"]["job"]["examples"] == [{"use": "package.module:Class"}]
    assert schema["properties"]["batch"]["default"] == {"global": 64, "micro": 8}
    assert schema["properties"]["length"]["default"] == {"epochs": 1}
    assert "determinism.recheck" not in schema["properties"]


def test_the_command_prints_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(here(monkeypatch, capfd, tmp_path, "schema")[1]) == spec_schema()
    assert json.loads(here(monkeypatch, capfd, tmp_path, "schema", "--sweep")[1]) == sweep_schema()
