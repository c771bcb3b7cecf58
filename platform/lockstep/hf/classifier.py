"""A classifier of texts.

Shapes: B texts in a micro-batch, T tokens of the longest, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lockstep.hf import problems, text_files
from lockstep.hf.pretrained import Pretrained, PretrainedParams
from lockstep.hf.tokens import Documents, Tokenizer
from lockstep.job.interface import Loss, Mean


class SequenceClassifier(Pretrained):
    """Tells the class of each text: `job: {use: "lockstep.hf:SequenceClassifier", params: …}`."""

    AUTO_MODEL, TASK = "AutoModelForSequenceClassification", "SEQ_CLS"

    class Params(PretrainedParams):
        """What a classifier needs besides."""

        label: str = "label"
        """The field or column of a row that is its class."""
        classes: tuple[str, ...] | None = None
        """The classes in the order of the model's outputs; None: the order that the model in `path` has, or else those of the training texts, sorted."""

    params: Params

    def train_data(self) -> Dataset[Any]:
        return self._labelled(self.params.train)

    def eval_data(self) -> Dataset[Any] | None:
        return None if self.params.eval is None else self._labelled(self.params.eval)

    def collate(self, samples: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` [B, T], padded behind the text; `labels` [B]."""
        rows = [tokens for tokens, _ in samples]
        return {
            "input_ids": pad_sequence(rows, batch_first=True, padding_value=float(self._pad)).long(),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
            "labels": torch.tensor([label for _, label in samples]),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        labels = batch["labels"]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits  # [B, C]
        total = F.cross_entropy(logits.float(), labels, reduction="sum")
        right = (logits.detach().argmax(1) == labels).sum()
        return Loss(total, weight=len(labels), parts={"accuracy": Mean(right, len(labels))})

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the model's outputs."""
        p, saved_classes = self.params, self._saved_classes
        if p.classes is not None:
            if saved_classes and p.classes != saved_classes and set(p.classes) == set(saved_classes):
                raise problems.OTHER_CLASSES(got=", ".join(p.classes), wanted=", ".join(saved_classes))
            return p.classes
        rows = text_files.read(text_files.find(p.train), p.text, p.label)
        labels = {str(row.label) for row in rows}
        for candidates in (saved_classes, _numbers(saved_classes)):
            if labels <= set(candidates):
                return candidates
        return tuple(sorted(labels))

    @cached_property
    def _saved_classes(self) -> tuple[str, ...]:
        """The classes of the classifier in `path`, in the order of its outputs; none of a model without such a head."""
        config = None if self.params.path is None else self._read_config()
        if config is None or not str((config.architectures or [""])[0]).endswith("ForSequenceClassification"):
            return ()
        return tuple(str(config.id2label[i]) for i in sorted(config.id2label))

    @property
    def _pad(self) -> int:
        pad = self.tokenizer.wrapped.pad_token_id
        if pad is None:
            raise problems.NO_PADDING()
        return int(pad)

    def _task_fields(self) -> dict[str, Any]:
        saved_classes = self._saved_classes
        named = dict(enumerate(saved_classes if self.classes == _numbers(saved_classes) else self.classes))
        return {
            "id2label": named,
            "label2id": {name: i for i, name in named.items()},
            "pad_token_id": self._pad,
        }

    def _labelled(self, source: str) -> Labelled:
        p = self.params
        return Labelled(source, self.tokenizer, p.text, p.label, p.length, self.classes)


def _numbers(classes: Sequence[str]) -> tuple[str, ...]:
    """What the texts have for these classes where they have their numbers."""
    return tuple(str(i) for i in range(len(classes)))


class Labelled(Dataset[tuple[Tensor, int]]):
    """Texts as tokens, each with the number of its class. DataError where one is of no class."""

    draws_nothing = True

    def __init__(
        self, source: str, tokenizer: Tokenizer, text: str, label: str, longest: int, classes: Sequence[str]
    ) -> None:
        self._documents = Documents(source, tokenizer, text=text, label=label, longest=longest)
        numbers = {name: i for i, name in enumerate(classes)}
        strange = sorted(set(self._documents.labels) - set(numbers))
        if strange:
            raise problems.TEXT_CLASS(source=source, got=strange[0], wanted=", ".join(classes))
        self._labels = [numbers[label] for label in self._documents.labels]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each text, for `data.shuffle: by_length`."""
        return self._documents.lengths

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._documents[index], self._labels[index]

    def fingerprint(self) -> dict[str, Any]:
        """What the texts are, and their classes."""
        return {**self._documents.fingerprint(), "classes": len(set(self._labels))}
