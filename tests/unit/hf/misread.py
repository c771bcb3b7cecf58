"""A language model whose library reads other weights than it wrote, once a file `misread` lies beside its tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lockstep.hf import CausalLM


class MisreadCausalLM(CausalLM):
    def load_pretrained(self, model: nn.Module, folder: Path) -> nn.Module:
        loaded = super().load_pretrained(model, folder)
        if Path(str(self.params.tokenizer)).with_name("misread").exists():
            with torch.no_grad():
                next(loaded.parameters())[0, 0] += 1
        return loaded
