"""A tokenizer from a local folder or file, and texts as tokens: made once, kept in the user's cache, and mapped into memory.

What is kept goes by the digests of the texts and of the tokenizer. Processes that begin at the same time each make it, and
write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.fingerprint import local_digest
from lockstep.data.user_cache import cache_path
from lockstep.errors import first_line
from lockstep.files import replacing
from lockstep.hf import problems, text_files
from lockstep.hf.libraries import transformers, versions
from lockstep.hf.text_files import Text

AT_ONCE = 1000
"""Texts that a tokenizer is given in one call."""

READ_AS = 2
"""Grows where the same files are read as other texts: what was kept before is none of these."""

OF_MODELS = ("config.json", "generation_config.json", "adapter_config.json")
OF_TOKENIZERS = (".json", ".txt", ".model", ".jinja", ".tiktoken")


class Tokenizer:
    """A tokenizer of transformers, and the sha256 of the files that it is read from.

    `source` is a folder as of `save_pretrained`, or a single `tokenizer.json`. SpecError where there is none, or it cannot be read.
    """

    def __init__(self, source: str) -> None:
        path = Path(source).expanduser()
        files = _files(path)
        if not files:
            raise problems.NO_TOKENIZER(got=source)
        named = {file.name: local_digest(file) for file in files}
        if path.is_file():
            named = {"tokenizer.json": named[path.name]}
        self.digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()
        library = transformers()
        try:
            if len(named) == 1 and "tokenizer.json" in named:
                self.wrapped: Any = library.PreTrainedTokenizerFast(tokenizer_file=str(files[0]))
            else:
                self.wrapped = library.AutoTokenizer.from_pretrained(
                    path, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # a library that reads a file of another's making
            raise problems.TOKENIZER_UNREADABLE(path=source, got=first_line(error)) from error

    def __len__(self) -> int:
        return len(self.wrapped)

    def token(self, text: str) -> int:
        """The id of one token. SpecError where the tokenizer does not know it."""
        token_id = self.wrapped.convert_tokens_to_ids(text)
        if token_id is None or self.wrapped.convert_ids_to_tokens(token_id) != text:
            raise problems.NO_TOKEN(got=text)
        return int(token_id)

    def tokens(self, texts: Iterable[str], longest: int | None = None) -> Iterator[list[int]]:
        """The tokens of each text, with the special ones that the tokenizer puts in itself; at most `longest`."""
        for batch in _batches(texts, AT_ONCE):
            encoding = self.wrapped(
                batch,
                truncation=longest is not None,
                max_length=longest,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            yield from encoding["input_ids"]


class Documents(Dataset[Tensor]):
    """Texts as rows of tokens, int64 tensors; `labels` are the texts' own where `label` names their field.

    A text has at most `longest` tokens. Its fingerprint is that of the files; the tokenizer's digest stands beside it in the identity.
    """

    draws_nothing = True

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        text: str,
        label: str | None = None,
        longest: int | None = None,
    ) -> None:
        self.files = text_files.find(source)
        self._text, self._label = text, label
        self._digests = text_files.digests(self.files)
        identity = (READ_AS, self._digests, tokenizer.digest, versions(), text, longest)
        self._tokens, self._ends = _cached_tokens(
            repr(identity), lambda: tokenizer.tokens((row.text for row in self._rows()), longest)
        )
        self.labels = [] if label is None else [str(row.label) for row in self._rows()]

    def _rows(self) -> Iterator[Text]:
        return text_files.read(self.files, self._text, self._label)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each text."""
        return np.diff(self._ends, prepend=0)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        start = int(self._ends[index - 1]) if index else 0
        return torch.from_numpy(self._tokens[start : int(self._ends[index])].astype(np.int64))

    def fingerprint(self) -> dict[str, Any]:
        """What the texts are."""
        return {**self._digests, "text": self._text, "label": self._label}


def _files(path: Path) -> list[Path]:
    """The files of a tokenizer in a folder that may hold a model besides; or the one file that is given."""
    if path.is_file():
        return [path]
    entries = sorted(path.iterdir()) if path.is_dir() else []
    return [
        file
        for file in entries
        if file.suffix in OF_TOKENIZERS
        and file.name not in OF_MODELS
        and not file.name.endswith(".index.json")
    ]


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


# --- what is kept ------------------------------------------------------------------------------------------------


TokenArrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""All tokens, one text after the other, and where each text ends."""


def _cached_tokens(identity: str, make: Callable[[], Iterable[list[int]]]) -> TokenArrays:
    """Tokens out of the cache, mapped into memory; made and put there where they are not. A cache that cannot be written costs time alone."""
    path = cache_path("tokens", identity)
    files = path.with_suffix(".tokens.npy"), path.with_suffix(".ends.npy")
    try:
        return np.load(files[0], mmap_mode="r"), np.load(files[1], mmap_mode="r")
    except (OSError, ValueError):  # not there, or of no tokens
        tokens, ends = _joined(list(make()))
    with suppress(OSError):
        for file, array in ((files[0], tokens), (files[1], ends)):
            with replacing(file) as content:
                np.save(content, array)
    return tokens, ends


def _joined(rows: Sequence[Sequence[int]]) -> TokenArrays:
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    tokens = np.fromiter((token for row in rows for token in row), np.int32, int(ends[-1]) if rows else 0)
    return tokens, ends
