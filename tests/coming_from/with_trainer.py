"""Handwritten digits with the Trainer of Hugging Face: torchrun --nproc-per-node 2 with_trainer.py [FOLDER]"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

EPOCHS, GLOBAL, MICRO, RATE, WARMUP, SEED = 15, 128, 32, 5e-3, 10, 17


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, held_out: bool) -> None:
        pixels, labels = load_digits(return_X_y=True)
        chosen = (torch.arange(len(labels)) % 5 == 0) == held_out
        self.pixels, self.labels = (
            torch.from_numpy(pixels).float()[chosen] / 16,
            torch.from_numpy(labels)[chosen],
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"pixels": self.pixels[i], "labels": self.labels[i]}


class Digits(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def main(folder: str) -> None:
    set_seed(SEED)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": MICRO,
        "per_device_eval_batch_size": MICRO,
        "gradient_accumulation_steps": GLOBAL // (MICRO * world),
        "learning_rate": RATE,
        "weight_decay": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": WARMUP,
        "max_grad_norm": 1.0,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 2,
        "dataloader_drop_last": True,
        "seed": SEED,
        "full_determinism": False,
        "use_cpu": True,
        "report_to": [],
    }
    trainer = Trainer(
        model=Digits(),
        args=TrainingArguments(**arguments),
        train_dataset=Rows(held_out=False),
        eval_dataset=Rows(held_out=True),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    print(f"eval/accuracy {trainer.evaluate()['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
