"""The jobs of this project pass every check and train without a word of diagnosis, with the samples that their pages say to write first."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).parents[3]
SAMPLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "tabular": {"train": "train", "evaluation": "eval"},
        "images": {"train": "train", "evaluation": "eval"},
        "hf/gpt": {"tokenizer": "tokenizer", "train": "texts/train", "eval": "texts/eval"},
        "hf/bert": {"tokenizer": "tokenizer", "train": "pieces/train.jsonl", "eval": "pieces/eval.jsonl"},
        "hf/lora": {"path": "model", "train": "texts/train", "eval": "texts/eval"},
    }
)
"""The parameters that name the sample's parts, for each job that reads one."""

SPECS = [
    "digits/train",
    "stdlib_gpt/train",
    "tabular/train",
    "images/train",
    "hf/gpt",
    "hf/bert",
    "hf/lora",
    *(f"practice/{name}" for name in ("gelu", "glu", "initialisation", "precision", "straight_through")),
]


def lockstep(*words: str) -> str:
    command = [sys.executable, "-m", "lockstep", *words]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples, and a trained model for the adapters."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("tabular", "images", "hf"):
        out = str(folder / name)
        subprocess.run([sys.executable, "-m", f"jobs.{name}.sample", "--out", out], cwd=ROOT, check=True)
    made = lockstep("train", "jobs/hf/gpt.yaml", "--local", "--json", *given("hf/gpt", folder, folder))
    exported = Path(json.loads(made.splitlines()[-1])["folder"])
    lockstep("export", exported.name, "--format", "pretrained", "--uri", "off", "--storage", str(folder))
    (model,) = exported.glob("export/pretrained/*/")
    (folder / "hf" / "model").symlink_to(model)
    return folder


def given(spec: str, data: Path, storage: Path) -> list[str]:
    """What a spec is started with: no record, and the places of its sample."""
    job = spec.removesuffix("/train")
    places = SAMPLES.get(job, {})
    return [
        "record.uri=off",
        f"checkpoint.storage={storage}",
        *(f"job.params.{name}={data / job.partition('/')[0] / part}" for name, part in places.items()),
    ]


@pytest.mark.exact
@pytest.mark.parametrize("spec", SPECS)
def test_every_check_passes(spec: str, data: Path, tmp_path: Path) -> None:
    """But for the loader: on a busy machine it may be slower than a model of a few numbers."""
    report = json.loads(
        lockstep("check", f"jobs/{spec}.yaml", "--local", "--json", *given(spec, data, tmp_path))
    )
    odd = [row for row in report["checks"] if row["result"] != "pass"]
    assert {row["name"] for row in odd} <= {"loader"}, odd


@pytest.mark.exact
@pytest.mark.parametrize("spec", SPECS)
def test_a_run_is_silent(spec: str, data: Path, tmp_path: Path) -> None:
    lockstep("train", f"jobs/{spec}.yaml", "--local", *given(spec, data, tmp_path))
    assert list(tmp_path.glob("*/ledger.parquet"))
    found = list(tmp_path.glob("*/diagnosis.json"))
    assert found == [], found[0].read_text()
