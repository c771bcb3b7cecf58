"""The jobs that lie in `jobs/` and one each of the further kinds, cut down to six steps of a few micro-batches, with the data that they want."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
STEPS = 6


def digits(folder: Path) -> dict[str, Any]:
    return {**_of("digits/train", width=4), "batch": {"global": 48, "micro": 8}}


def stdlib_gpt(folder: Path) -> dict[str, Any]:
    small = {"depth": 1, "heads": 2, "head_width": 8, "context": 32, "corpus_bytes": 100_000}
    return {**_of("stdlib_gpt/train", **small), "batch": {"global": 12, "micro": 2}}


def tabular(folder: Path) -> dict[str, Any]:
    from jobs.tabular.sample import write_sample

    where = {"train": str(folder / "train"), "evaluation": str(folder / "eval")}
    write_sample(Path(where["train"]), 600, 8)
    write_sample(Path(where["evaluation"]), 90, 8, start=1)
    return {**_of("tabular/train", **where, inputs=8), "batch": {"global": 96, "micro": 16}}


def images(folder: Path) -> dict[str, Any]:
    from jobs.images.sample import write_sample

    write_sample(folder / "train", 48, 20, seed=1)
    write_sample(folder / "eval", 7, 20, seed=2)
    where = {"train": str(folder / "train"), "evaluation": str(folder / "eval")}
    return {**_of("images/train", **where, size=16, width=2), "batch": {"global": 16, "micro": 4}}


def hf_gpt(folder: Path) -> dict[str, Any]:
    texts = _texts(folder)
    where = {
        "train": f"{texts}/texts/train",
        "eval": f"{texts}/texts/eval",
        "tokenizer": f"{texts}/tokenizer",
    }
    return {**_of("hf/gpt", **where, length=32), "batch": {"global": 8, "micro": 2}}


def hf_lora(folder: Path) -> dict[str, Any]:
    from lockstep.job.loading import load_job

    whole = hf_gpt(folder)["job"]
    job: Any = load_job(whole["use"], whole["params"])
    job.save_pretrained(job.model(), folder / "model")
    where = {name: whole["params"][name] for name in ("train", "eval")}
    return {
        **_of("hf/lora", **where, path=str(folder / "model"), length=32),
        "batch": {"global": 8, "micro": 2},
    }


def hf_bert(folder: Path) -> dict[str, Any]:
    texts = _texts(folder)
    pieces = {name: f"{texts}/pieces/{name}.jsonl" for name in ("train", "eval")}
    return {
        **_of("hf/bert", **pieces, tokenizer=f"{texts}/tokenizer", length=32),
        "batch": {"global": 8, "micro": 2},
    }


def practice(name: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {**_of(f"practice/{name}"), "batch": {"global": 48, "micro": 8}}


def phases(folder: Path) -> dict[str, Any]:
    from tests.distributed.kinds import document
    from tests.distributed.phase_kinds import Gan

    return document(Gan)


def phases_in_fp16(folder: Path) -> dict[str, Any]:
    """Epochs of three steps, the last one ragged; a sample overflows in the judge, in the first step and in the fourth."""
    from tests.distributed.test_phases import in_halves

    return {**in_halves(3), "batch": {"global": 16, "micro": 4}}


def tar_shards(folder: Path) -> dict[str, Any]:
    from tests.distributed.test_tar_shards import Classes, write

    write(folder / "train", 4, 9, 1)
    write(folder / "eval", 1, 7, 2)
    return {
        "job": {"use": f"{Classes.__module__}:Classes", "params": {"folder": str(folder)}},
        "batch": {"global": 12, "micro": 3},
    }


SHIPPED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "digits": digits,
    "stdlib_gpt": stdlib_gpt,
    "tabular": tabular,
    "images": images,
    "hf/gpt": hf_gpt,
    "hf/lora": hf_lora,
    "hf/bert": hf_bert,
    **{
        f"practice/{name}": practice(name)
        for name in ("gelu", "glu", "straight_through", "initialisation", "precision")
    },
    "phases": phases,
    "phases in fp16": phases_in_fp16,
    "tar shards": tar_shards,
}


def document(name: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """The spec of one of them, with checkpoints after 2, 4 and 6 steps; its data are written into `folder`."""
    found = SHIPPED[name](folder)
    return {
        **found,
        "length": {"steps": STEPS},
        "evaluate": {"every": {"steps": 3}},
        "checkpoint": {"storage": str(folder / "runs"), "every": {"steps": 2}, "keep_last": 9},
        "record": {"uri": "off", "digest_every": 2},
        **changes,
    }


def _of(spec: str, /, **params: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "jobs" / f"{spec}.yaml").read_text())
    found["job"] = {**found["job"], "params": {**found["job"].get("params", {}), **params}}
    return found


def _texts(folder: Path) -> Path:
    from jobs.hf.sample import write_sample

    write_sample(folder, 60_000, 300)
    return folder
