"""What the jobs for Hugging Face models share: a model from a config or a local folder, adapters, its tokenizer, its identity."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic
import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import nn

from lockstep.errors import SpecError, first_line
from lockstep.hf.libraries import peft, transformers, versions
from lockstep.hf.tokens import Tokenizer
from lockstep.job.interface import Job, Params, Placement

OF_A_FILE = frozenset(
    {"_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_internal"}
)
"""Fields of a config that say where it was read from, or by what."""


class Lora(Params):
    """Adapters of low rank (Hu et al. 2021, arXiv 2106.09685), by peft: they learn, and the model below them is frozen."""

    r: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: NonNegativeFloat = Field(default=0.0, lt=1)
    targets: tuple[str, ...] | None = None
    """Names of the modules that get adapters, such as `q_proj`; None: peft's own choice for this kind of model."""


class PretrainedParams(Params):
    """Which model, and where its tokenizer and its texts are. Files are known by their digests, and may move."""

    config: dict[str, Any] | None = None
    """A new model: `model_type` and the fields of its config."""
    path: Placement[str | None] = None
    """Or a folder that `save_pretrained` wrote, with safetensors."""
    tokenizer: Placement[str | None] = None
    """A folder with a tokenizer, or a tokenizer.json; None: in `path`."""
    train: Placement[str]
    """Texts: a file, a folder or a glob."""
    eval: Placement[str | None] = None
    """Held-out texts."""
    text: str = "text"
    """The field or column of a row that is the text."""
    length: int = Field(default=128, ge=2)
    """Tokens of a row, or of the longest text."""
    attention: Literal["sdpa", "eager"] | None = None
    """How attention is computed; None: by torch's kernels (`sdpa`) where the model can."""
    lora: Lora | None = None

    @pydantic.model_validator(mode="after")
    def _one_model(self) -> PretrainedParams:
        if (self.config is None) == (self.path is None):
            got = "both" if self.config is not None else "neither"
            raise ValueError(
                f"got {got} of config and path, wanted one of them: a new model, or a folder with one"
            )
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config has no model_type, such as gpt2, llama or bert")
        if self.tokenizer is None and self.path is None:
            raise ValueError("a model from a config needs a tokenizer: a folder, or a tokenizer.json")
        if self.lora is not None and self.path is None:
            raise ValueError(
                "lora on a model from a config, whose frozen weights would be random; wanted path"
            )
        return self


class Pretrained(Job):
    """Base of the jobs here: a model of transformers, whose kind a subclass names."""

    Params = PretrainedParams
    AUTO_MODEL: ClassVar[str]
    TASK: ClassVar[str]
    """The class of transformers that makes the model, and peft's name of the task."""

    params: PretrainedParams

    def model(self) -> nn.Module:
        p, library = self.params, transformers()
        config, auto = self._config(), getattr(library, self.AUTO_MODEL)
        try:
            if p.path is None:
                made = auto.from_config(config, attn_implementation=p.attention, dtype=torch.float32)
            else:
                made = auto.from_pretrained(
                    Path(p.path).expanduser(),
                    config=config,
                    attn_implementation=p.attention,
                    dtype=torch.float32,
                    local_files_only=True,
                    use_safetensors=True,
                )
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
            raise SpecError(
                f"job.params.{'config' if p.path is None else 'path'}: transformers makes no {self.AUTO_MODEL} of it: "
                f"{first_line(error)}"
            ) from error
        self._check_sizes(made)
        model: nn.Module = made if p.lora is None else self._with_adapters(made, p.lora)
        return model

    def identity(self) -> dict[str, Any]:
        """The libraries' versions, the tokenizer, and the config of a model in a folder."""
        config = {k: v for k, v in self._config().to_dict().items() if k not in OF_A_FILE}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
        return {**versions(), "config": digest, "tokenizer": self.tokenizer.digest}

    def activation_checkpoints(self, model: nn.Module) -> Iterable[nn.Module]:
        """The layers that transformers itself would checkpoint."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def save_pretrained(self, model: nn.Module, folder: Path) -> None:
        """The model, or its adapters alone, with the tokenizer."""
        super().save_pretrained(model, folder)
        self.tokenizer.own.save_pretrained(folder)

    def load_pretrained(self, model: nn.Module, folder: Path) -> nn.Module:
        if self.params.lora is None:
            return super().load_pretrained(model, folder)
        base = getattr(transformers(), self.AUTO_MODEL).from_pretrained(
            Path(str(self.params.path)).expanduser(),
            config=self._config(),
            dtype=torch.float32,
            local_files_only=True,
        )
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            loaded: nn.Module = peft().PeftModel.from_pretrained(base, folder)
        return loaded

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read when it is first asked for."""
        return Tokenizer(self.params.tokenizer or str(self.params.path))

    def _config(self) -> Any:
        """The model's config. A new one takes what it does not say of the vocabulary from the tokenizer."""
        p, library = self.params, transformers()
        try:
            if p.config is not None:
                given = {**self._of_vocabulary(), **self._of_task(), **p.config}
                return library.AutoConfig.for_model(**given)
            return library.AutoConfig.from_pretrained(
                Path(str(p.path)).expanduser(), local_files_only=True, **self._of_task()
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            place = "config" if p.path is None else "path"
            hint = (
                ""
                if p.path is None
                else "; wanted a folder as of save_pretrained: nothing is fetched from a hub"
            )
            raise SpecError(f"job.params.{place}: {first_line(error)}{hint}") from error

    def _of_vocabulary(self) -> dict[str, Any]:
        own = self.tokenizer.own
        known = {f"{name}_token_id": getattr(own, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        return {"vocab_size": len(self.tokenizer), **known}

    def _of_task(self) -> dict[str, Any]:
        """Fields of the config that follow from the task."""
        return {}

    def _check_sizes(self, model: Any) -> None:
        """SpecError where a token or a position has no embedding."""
        tokens, known = len(self.tokenizer), model.get_input_embeddings().weight.shape[0]
        if tokens > known:
            raise SpecError(
                f"job.params: the tokenizer has {tokens} tokens, and the model's vocab_size is {known}; wanted at least as many"
            )
        most = getattr(model.config, "max_position_embeddings", None)
        if isinstance(most, int) and self.params.length > most:
            raise SpecError(
                f"job.params.length: got {self.params.length}, and the model has {most} positions; wanted at most so many"
            )

    def _with_adapters(self, model: Any, lora: Lora) -> Any:
        library = peft()
        config = library.LoraConfig(
            task_type=self.TASK,
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=None if lora.targets is None else list(lora.targets),
        )
        try:
            with warnings.catch_warnings(
                action="ignore", category=FutureWarning
            ):  # libraries about each other
                return library.get_peft_model(model, config)
        except ValueError as error:
            raise SpecError(f"job.params.lora.targets: {first_line(error)}") from error
