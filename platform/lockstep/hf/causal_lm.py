"""A causal language model on packed documents.

Shapes: B rows in a micro-batch, T tokens in a row, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.data.packing import Packed
from lockstep.errors import first_line
from lockstep.hf import problems
from lockstep.hf.pretrained import Pretrained, PretrainedParams
from lockstep.hf.tokens import Documents
from lockstep.job.interface import Loss

IGNORED = -100
"""The target of a token that has no loss: the last of a document's part of a row, and padding."""

SLIDING = "sliding_attention"
WINDOWS = ("sliding_window", "attention_chunk_size")
"""The type of layers that see a window of tokens, and the fields of a config that say how many are seen."""

NEAR = 2
"""The window, in tokens, that a model with one shorter than its rows has while it is tested: a test of a whole window could take seconds."""

ROUNDING = 1e-4
"""The share of the largest logit up to which logits in fp32 may differ for other kernels and orders of addition: they round in the seventh digit.
A mask or positions that are other ones show in the second.
"""

SEEN = 1e-4
"""The share of a change of the logits from which on it was seen elsewhere. Models that see it show more even before they are trained;
experts that are computed together with other tokens round in the seventh digit.
"""


class CausalLM(Pretrained):
    """Predicts each next token of packed documents: `job: {use: "lockstep.hf:CausalLM", params: …}`."""

    AUTO_MODEL, TASK = "AutoModelForCausalLM", "CAUSAL_LM"

    class Params(PretrainedParams):
        """What a language model needs besides."""

        end: str | None = None
        """The token behind each document; None: the tokenizer's eos token, or none."""
        across_documents: bool = False
        """Whether tokens see, and predict, those of other documents in their row. Otherwise a document begins at position 0."""

    params: Params

    def model(self) -> nn.Module:
        model = super().model()
        self._check_sight(model)
        return model

    def train_data(self) -> Dataset[Any]:
        return self._rows(self.params.train)

    def eval_data(self) -> Dataset[Any] | None:
        return None if self.params.eval is None else self._rows(self.params.eval)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        targets = self._targets(batch)  # [B, T]
        logits = self._logits(model, batch).flatten(0, 1).float()  # [B T, V]
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(total, weight=(targets != IGNORED).sum())

    def _rows(self, source: str) -> Packed:
        p, tokenizer = self.params, self.tokenizer
        documents = Documents(source, tokenizer, text=p.text)
        end = tokenizer.wrapped.eos_token_id if p.end is None else tokenizer.token(p.end)
        # The last row is filled: its padding, whatever its token, is seen by nothing and has no loss.
        return Packed(documents, p.length, end=end, pad=0, lengths=documents.lengths.tolist())

    def _targets(self, batch: dict[str, Tensor]) -> Tensor:
        tokens, documents = batch["tokens"], batch["documents"]
        inside = documents[:, 1:] >= 0
        if not self.params.across_documents:
            inside &= documents[:, 1:] == documents[:, :-1]
        return F.pad(tokens[:, 1:].masked_fill(~inside, IGNORED), (0, 1), value=IGNORED)

    def _logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": batch["tokens"], "use_cache": False}
        if not self.params.across_documents:
            inputs["attention_mask"] = _mask(model, batch["documents"])
            inputs["position_ids"] = batch["positions"]
        logits: Tensor = model(**inputs).logits
        return logits

    def _check_sight(self, model: nn.Module) -> None:
        """SpecError where a token sees one behind it or in another document: some kinds of model do not look at masks and positions."""
        size = min(8, self.params.length // 2)
        zeros, ones = torch.zeros(1, size, dtype=torch.int64), torch.ones(1, size, dtype=torch.int64)
        documents, positions = torch.cat([zeros, ones], 1), torch.arange(size).repeat(2).unsqueeze(0)

        def plain(first: Tensor, second: Tensor) -> Tensor:
            logits: Tensor = model(input_ids=torch.cat([first, second], 1)).logits
            return logits

        def packed(first: Tensor, second: Tensor) -> Tensor:
            tokens = torch.cat([first, second], 1)
            return self._logits(model, {"tokens": tokens, "documents": documents, "positions": positions})

        def alone(document: Tensor) -> Tensor:
            order = torch.arange(document.shape[1]).unsqueeze(0)
            return self._logits(model, {"tokens": document, "documents": document * 0, "positions": order})

        tokens = torch.arange(2 * size).unsqueeze(0) % len(self.tokenizer)
        first, second = tokens[:, :size], tokens[:, size:]

        model.eval()  # it is put into training mode before it trains
        with torch.no_grad():
            if _sees(plain(zeros, zeros), plain(zeros, ones), slice(0, size)):
                raise problems.NOT_CAUSAL(model=type(model).__name__)
            if self.params.across_documents:
                return
            try:
                leaks = _sees(packed(zeros, zeros), packed(ones, zeros), slice(size, None))
                moved = _difference(packed(first, second)[:, size:], alone(second))
                with _short_windows(model, self.params.length):
                    difference = _difference(alone(tokens), model(input_ids=tokens).logits)
            except (TypeError, ValueError, RuntimeError, LookupError) as error:
                raise problems.NO_MASKS(model=type(model).__name__, got=first_line(error)) from error
        if leaks:
            raise problems.MASKS_UNUSED(model=type(model).__name__)
        if moved:
            raise problems.PACKED_DIFFER(model=type(model).__name__, got=moved)
        if difference:
            raise problems.MASKS_DIFFER(model=type(model).__name__, got=difference)


def _difference(logits: Tensor, expected: Tensor) -> str:
    """How far logits are from those expected, for a message; empty where rounding explains it."""
    difference = float((logits - expected).abs().max())
    return "" if difference <= ROUNDING * float(expected.abs().max()) else f"{difference:.3g}"


def _sees(original: Tensor, changed: Tensor, where: slice) -> bool:
    """Whether the tokens at `where` see a change of the others: from logits [1, T, V] before it and after it."""
    change = (changed - original).abs()
    return bool(change[:, where].max() > SEEN * change.max())


def _mask(model: nn.Module, documents: Tensor) -> Tensor | dict[str, Tensor]:
    """Which tokens each one sees [B, 1, T, T]: itself and those before it in its document; for `eager` as what is added to scores.

    Layers with a sliding window see that many of them. Of a model that has layers of several types, a mask for each type.
    """
    config = _config_of_text(model)
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    visible = (documents.unsqueeze(1) == documents.unsqueeze(2)).tril().unsqueeze(1)
    near = visible if window is None else visible.triu(1 - window)
    if window is None or not types:
        return _attention_mask(model, near)
    return {
        kind: _attention_mask(model, near if kind == SLIDING else visible) for kind in dict.fromkeys(types)
    }


def _attention_mask(model: nn.Module, visible: Tensor) -> Tensor:
    """A mask in the form that the model's attention takes: truth values for `sdpa`, else what is added to the scores."""
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        return visible
    return torch.zeros(visible.shape, device=visible.device).masked_fill(
        ~visible, torch.finfo(torch.float32).min
    )


def _config_of_text(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config()


@contextmanager
def _short_windows(model: nn.Module, length: int) -> Iterator[None]:
    """Give a model whose layers see a window of tokens, or chunks of them, a short one, where it is shorter than rows of `length`."""
    config = _config_of_text(model)
    windows = {name: getattr(config, name, None) for name in WINDOWS}
    original = {name: value for name, value in windows.items() if isinstance(value, int) and value < length}
    for name, value in original.items():
        setattr(config, name, min(NEAR, value))
    try:
        yield
    finally:
        for name, value in original.items():
            setattr(config, name, value)
