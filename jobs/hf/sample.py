"""Writes what the specs here train on: `python -m jobs.hf.sample [--out FOLDER] [--bytes N]`.

Texts from the standard library's source, and a tokenizer that is trained on them. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jobs.stdlib_gpt.job import HELD_OUT, cut, modules

TOKENS = 2048
"""Tokens of the vocabulary."""

CLASSES = {"arguments": "argument", "errors": "raise ", "encodings": "encod", "trees": "node"}
"""The classes of the pieces, each with a word that stands in its pieces alone."""

END, PAD = "<end>", "<pad>"
"""Special tokens: behind a document, and in the place of none."""


def write_sample(folder: Path, most_bytes: int, tokens: int = TOKENS) -> None:
    """`texts/train` and `texts/eval` (a file each module), `pieces/train.jsonl` and `pieces/eval.jsonl` (texts with labels), `tokenizer`."""
    sources = [source.decode("utf-8", errors="replace") for source in modules(most_bytes)]
    for number, source in enumerate(sources):
        part = "eval" if number % HELD_OUT == 0 else "train"
        path = folder / "texts" / part / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    pieces = list(labelled_pieces(sources))
    (folder / "pieces").mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", [row for i, row in enumerate(pieces) if i % 8]), ("eval", pieces[::8])):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "pieces" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    made_tokenizer(sources, tokens).save_pretrained(folder / "tokenizer")


def labelled_pieces(sources: list[str]) -> Iterator[dict[str, str]]:
    """Pieces of source that have the word of one class and of no other, each text once."""
    seen = set()
    for source in sources:
        for piece in cut(source.encode(), 400):
            text = piece.decode("utf-8", errors="replace")
            found = [name for name, word in CLASSES.items() if word in text]
            if len(found) == 1 and text not in seen:
                seen.add(text)
                yield {"text": text, "label": found[0]}


def made_tokenizer(texts: list[str], tokens: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `tokens` tokens, trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--out", type=Path, default=Path("data/hf"))
    parser.add_argument("--bytes", type=int, default=600_000, help="of source")
    options = parser.parse_args()
    write_sample(options.out, options.bytes)


if __name__ == "__main__":
    main()
