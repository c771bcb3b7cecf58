"""A bare Ray Train script on handwritten digits, as its documentation would write it: the peer of `first_step.py`.

Prints the seconds from the start of its command to the end of the first optimizer step.
"""

import os
import sys
import tempfile
import time
from pathlib import Path


def train_loop(config):
    import ray.train
    import torch
    import torch.nn.functional as F
    from ray.train.torch import prepare_data_loader, prepare_model
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    data = TensorDataset(images, torch.tensor(digits.target))
    model = prepare_model(
        nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = prepare_data_loader(DataLoader(data, batch_size=64, shuffle=True, drop_last=True))
    model.train()
    images, labels = next(iter(loader))
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["out"]).write_text(repr(time.time()))


if __name__ == "__main__":
    began_at = float(sys.argv[1])
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "first-step")
        ray.init(address=os.environ.get("RAY_ADDRESS", "local"))
        TorchTrainer(
            train_loop,
            train_loop_config={"out": str(out)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=os.path.join(folder, "results")),  # noqa: PTH118
        ).fit()
        print(float(out.read_text()) - began_at)
