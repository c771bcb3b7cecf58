"""Jobs for Hugging Face models that need no code: a spec names the model, the tokenizer and the texts.

`lockstep.hf:CausalLM` and `lockstep.hf:SequenceClassifier`. Transformers and peft are imported when a job makes its model or
reads its texts. Nothing is fetched from a hub: models and tokenizers are folders on a disk.
"""

from __future__ import annotations

from lockstep.hf.causal_lm import CausalLM
from lockstep.hf.classifier import SequenceClassifier

__all__ = ["CausalLM", "SequenceClassifier"]
