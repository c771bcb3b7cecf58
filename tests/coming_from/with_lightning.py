"""Handwritten digits with Lightning: python with_lightning.py [FOLDER]"""

from __future__ import annotations

import math
import sys

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, GLOBAL, MICRO, RATE, WARMUP, SEED = 15, 128, 32, 5e-3, 10, 17


class Data(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
        held_out = torch.arange(len(y)) % 5 == 0
        self.train, self.held_out = (
            TensorDataset(x[~held_out], y[~held_out]),
            TensorDataset(x[held_out], y[held_out]),
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, MICRO, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.held_out, MICRO)


class Digits(lightning.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("eval/loss", F.cross_entropy(logits, y), batch_size=len(y), sync_dist=True)
        self.log("eval/accuracy", (logits.argmax(1) == y).float().mean(), batch_size=len(y), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
        updates = self.trainer.estimated_stepping_batches

        def factor(update: int) -> float:
            if update < WARMUP:
                return (update + 1) / WARMUP
            return 0.5 * (1 + math.cos(math.pi * (update - WARMUP) / (updates - WARMUP)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(folder: str, devices: int = 2) -> None:
    lightning.seed_everything(SEED, workers=True)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        accumulate_grad_batches=GLOBAL // (MICRO * devices),
        gradient_clip_val=1.0,
        deterministic=True,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)],
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), Data(), ckpt_path="last")
    print(f"eval/accuracy {trainer.callback_metrics['eval/accuracy']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
