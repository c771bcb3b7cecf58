"""What the jobs for Hugging Face models share: a model from a config or a local folder, adapters, its tokenizer, its identity."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep.errors import first_line, nearest
from lockstep.hf import problems
from lockstep.hf.adapters import Lora, with_adapters
from lockstep.hf.libraries import peft, transformers, versions, wrong_field
from lockstep.hf.tokens import Tokenizer
from lockstep.job.interface import Job, Params, Placement

FILE_FIELDS = frozenset(
    {"_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_internal"}
)
"""Fields of a config that say where it was read from, or by what."""


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
    _initialized: Sequence[str] = ()
    """The weights of the model that `path` does not have: they begin with random values."""

    def model(self) -> nn.Module:
        p, library = self.params, transformers()
        config, auto = self._config(), getattr(library, self.AUTO_MODEL)
        try:
            if p.path is None:
                base_model = auto.from_config(config, attn_implementation=p.attention, dtype=torch.float32)
            else:
                saved_class = _saved_class(config)
                base_model, loading_info = auto.from_pretrained(
                    Path(p.path).expanduser(),
                    config=config,
                    attn_implementation=p.attention,
                    dtype=torch.float32,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                )
                self._check_weights(base_model, loading_info, saved_class)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
            raise problems.NO_AUTO_MODEL(
                param="config" if p.path is None else "path", kind=self.AUTO_MODEL, got=first_line(error)
            ) from error
        self._check_sizes(base_model)
        model: nn.Module = base_model if p.lora is None else with_adapters(base_model, p.lora, self.TASK)
        return model

    def identity(self) -> dict[str, Any]:
        """The libraries' versions, the tokenizer, and the config of a model in a folder."""
        config = {k: v for k, v in self._config().to_dict().items() if k not in FILE_FIELDS}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
        return {**versions(), "config": digest, "tokenizer": self.tokenizer.digest}

    def activation_checkpoints(self, model: nn.Module) -> Iterable[nn.Module]:
        """The layers that transformers itself would checkpoint."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def save_pretrained(self, model: nn.Module, folder: Path) -> None:
        """The model, or its adapters alone, with the tokenizer."""
        super().save_pretrained(model, folder)
        if self.params.lora is not None:
            self._add_initialized(model, folder / "adapter_model.safetensors")
        self.tokenizer.wrapped.save_pretrained(folder)

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
        # Of a head that learns peft keeps the one before it as well, computes nothing with it, and saves it nowhere.
        unused = {name: value for name, value in model.state_dict().items() if ".original_module." in name}
        loaded.load_state_dict(unused, strict=False)
        return loaded

    def _add_initialized(self, model: nn.Module, adapters: Path) -> None:
        """Add to a file of adapters the frozen weights that began with random values: `path` does not have them, and peft reads them but does not save them."""
        state = model.state_dict()
        initialized = {
            name: state[name]
            for name in (f"base_model.model.{weight}" for weight in self._initialized)
            if name in state
        }
        if initialized:
            save_file(load_file(adapters) | initialized, adapters, {"format": "pt"})

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read when it is first asked for."""
        return Tokenizer(self.params.tokenizer or str(self.params.path))

    def _config(self) -> Any:
        """The model's config. A new one takes what it does not say of the vocabulary from the tokenizer."""
        p = self.params
        try:
            if p.config is not None:
                arguments = {**self._vocabulary_fields(), **self._task_fields(), **p.config}
                config = transformers().AutoConfig.for_model(**arguments)
                _check_fields(config, p.config, "")
                return config
            return self._read_config(**self._task_fields())
        except (OSError, ValueError, TypeError, KeyError, wrong_field()) as error:
            param = "config" if p.path is None else "path"
            hint = (
                self._missing_token(str(error))
                if p.path is None
                else "; wanted a folder as of save_pretrained: nothing is fetched from a hub"
            )
            raise problems.PARAM_REFUSED(param=param, got=first_line(error), hint=hint) from error

    def _read_config(self, **changed: Any) -> Any:
        """The config in `path`, with other fields where there are some. Raises what transformers does, SpecError where the folder has adapters."""
        folder = Path(str(self.params.path)).expanduser()
        if (folder / "adapter_config.json").is_file():
            raise problems.ADAPTERS(path=self.params.path)
        return transformers().AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **changed
        )

    def _vocabulary_fields(self) -> dict[str, Any]:
        tokenizer = self.tokenizer.wrapped
        token_ids = {
            f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
        }
        return {"vocab_size": len(self.tokenizer), **token_ids}

    def _missing_token(self, refusal: str) -> str:
        """What to do where a kind of model wants a token that the tokenizer has not; empty for any other refusal."""
        given = self.params.config or {}
        lacking = (name for name, value in self._vocabulary_fields().items() if value is None)
        name = next((name for name in lacking if name not in given and f"'{name}'" in refusal), "")
        return f"; the tokenizer has no such token: give {name} in config" if name else ""

    def _task_fields(self) -> dict[str, Any]:
        """Fields of the config that follow from the task."""
        return {}

    def _check_weights(self, model: Any, loading_info: Mapping[str, Any], saved_class: Any) -> None:
        """SpecError where the folder lacks weights of the model, or has others. `loading_info` is what transformers reports: it knows those that are tied or made.

        Only weights that `saved_class`, the class of the model in the folder, does not have begin anew, with a warning: the head of another task.
        """
        in_folder = (
            None if saved_class is None or saved_class is type(model) else _names(saved_class, model.config)
        )
        task = type(model).base_model_prefix

        def of_another_task(name: str) -> bool:
            return in_folder is not None and name.removeprefix(f"{task}.") not in in_folder

        missing = sorted(loading_info["missing_keys"])
        wrong = [
            *(
                f"{name!r} has the shape {tuple(got)}, wanted {tuple(expected)}"
                for name, got, expected in sorted(
                    loading_info["mismatched_keys"], key=lambda mismatch: str(mismatch[0])
                )
            ),
            *(f"{name!r} is missing" for name in missing if not of_another_task(name)),
            *(
                f"{name!r} has no place in the model"
                for name in sorted(loading_info["unexpected_keys"])
                if in_folder is None or of_another_task(name)
            ),
        ]
        if wrong:
            more = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
            raise problems.OTHER_WEIGHTS(
                path=self.params.path, model=type(model).__name__, got=wrong[0], more=more
            )
        self._initialized = missing
        self._model_warnings = tuple(
            f"job.params.path: {name!r} is not in {self.params.path!r}, which holds a {saved_class.__name__}; it begins with random values"
            for name in missing
        )

    def _check_sizes(self, model: Any) -> None:
        """SpecError where a token or a position has no embedding."""
        tokens, vocab_size = len(self.tokenizer), model.get_input_embeddings().weight.shape[0]
        if tokens > vocab_size:
            raise problems.VOCABULARY(tokens=tokens, got=vocab_size)
        most = getattr(model.config, "max_position_embeddings", None)
        if isinstance(most, int) and self.params.length > most:
            raise problems.POSITIONS(got=self.params.length, wanted=most)


def _saved_class(config: Any) -> Any:
    """The class of transformers that a folder with this config was saved from; None where it does not say."""
    return getattr(transformers(), next(iter(config.architectures or ()), ""), None)


def _names(kind: Any, config: Any) -> set[str]:
    """The names of the weights of a class of models, without the prefix of the part that models for all tasks share."""
    with torch.device("meta"):
        model = kind(config)
    return {name.removeprefix(f"{kind.base_model_prefix}.") for name in model.state_dict()}


def _is_read(kind: type, name: str) -> bool:
    """Whether the source of a kind of models reads a field that its config does not declare, such as `getattr(config, "head_dim", None)`."""
    places = (kind.__module__, kind.__module__.replace(".configuration_", ".modeling_"))
    specs = (importlib.util.find_spec(module_name) for module_name in places)
    sources = [Path(spec.origin).read_text(encoding="utf-8") for spec in specs if spec and spec.origin]
    return any(
        re.search(rf"""\bconfig\.{re.escape(name)}\b|["']{re.escape(name)}["']""", source)
        for source in sources
    )


def _check_fields(config: Any, fields: Mapping[str, Any], prefix: str) -> None:
    """SpecError for a field that no model of this kind has: a config of transformers takes any. `prefix` leads to nested fields, `text_config.`."""
    kind = type(config)
    declared = {field.name for field in dataclasses.fields(config)} | set(kind.attribute_map)
    for name, value in fields.items():
        part = getattr(config, name, None)
        if isinstance(value, Mapping) and isinstance(part, transformers().PreTrainedConfig):
            _check_fields(part, value, f"{prefix}{name}.")
        # What it takes under an older name is not kept under that.
        elif (
            name in vars(config)
            and name not in declared
            and not hasattr(kind, name)
            and not _is_read(kind, name)
        ):
            raise problems.NO_CONFIG_FIELD(
                config=kind.__name__, name=prefix + name, hint=nearest(name, declared)
            )
