"""Texts, a tokenizer and models for tests, made on the spot in a folder; and the specs that train on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.forked import ROOT

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 64}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def make(folder: Path) -> Path:
    """`tokenizer`, `train` and `held-out` (documents of some lines each), `pieces.jsonl` and `held-out.jsonl` (labelled texts)."""
    from jobs.hf.sample import made_tokenizer  # and transformers, for the tests of this folder alone

    text = (ROOT / "docs" / "exact-step.md").read_text()
    paragraphs = [part for part in text.split("\n\n") if len(part) < 800]
    made_tokenizer([text], 300).save_pretrained(folder / "tokenizer")
    for name, some in (("train", paragraphs[:16]), ("held-out", paragraphs[16:20])):
        (folder / name).mkdir()
        for number, paragraph in enumerate(some):
            (folder / name / f"{number:02}.txt").write_text(paragraph)
    lines = [line for line in text.splitlines() if 20 < len(line) < 160]
    for name, rows in (("pieces", lines[:33]), ("held-out", lines[33:40])):
        labelled = ({"text": row, "label": "within" if row[0].islower() else "start"} for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    return folder


def language_model(folder: Path, kind: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    """A run of three steps of a causal language model; by a folder `path` in place of a config where `params` have one."""
    more = {} if "path" in params else {"config": {**(kind or GPT2), **params.pop("of_config", {})}}
    return {
        "job": {
            "use": "lockstep.hf:CausalLM",
            "params": {
                "tokenizer": str(folder / "tokenizer"),
                "train": str(folder / "train"),
                "eval": str(folder / "held-out"),
                "length": 33,
                **more,
                **params,
            },
        },
        "seed": 5,
        "length": {"steps": 3},
        "batch": {"global": 12, "micro": 2},
        "optimizer": {"lr": 0.01},
        "clip_norm": 1.0,
        "evaluate": {"every": {"steps": 3}},
        "rehearsal": "off",
    }


def classifier(folder: Path, kind: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    """A run of an epoch of three steps of a classifier, the last one ragged."""
    document = language_model(folder)
    document["job"] = {
        "use": "lockstep.hf:SequenceClassifier",
        "params": {
            "config": kind or BERT,
            "tokenizer": str(folder / "tokenizer"),
            "train": str(folder / "pieces.jsonl"),
            "eval": str(folder / "held-out.jsonl"),
            "length": 48,
            **params,
        },
    }
    return {**document, "length": {"epochs": 1}, "data": {"drop_last": False}}
