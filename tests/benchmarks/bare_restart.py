"""A bare Ray Train script that saves and goes on, as its documentation would write it: the peer of `restart.py`.

    python bare_restart.py ADDRESS FOLDER STEPS PAUSE_S EVERY WORKERS

Rank 0 appends `seconds step` to FOLDER/steps after each optimizer step.
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
    from ray.train import Checkpoint
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
    step, rank = 0, ray.train.get_context().get_world_rank()
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)  # noqa: PTH118
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model.train()
    while step < config["steps"]:
        for images, labels in loader:
            time.sleep(config["pause_s"])
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            step += 1
            if rank == 0:
                with open(config["out"], "a") as file:  # noqa: PTH123
                    file.write(f"{time.time()} {step}\n")
            if step % config["every"] == 0:
                with tempfile.TemporaryDirectory() as folder:
                    if rank == 0:
                        state = {
                            "model": model.module.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "step": step,
                        }
                        torch.save(state, os.path.join(folder, "state.pt"))  # noqa: PTH118
                    given = Checkpoint.from_directory(folder) if rank == 0 else None
                    ray.train.report({"step": step}, checkpoint=given)
            if step >= config["steps"]:
                break


if __name__ == "__main__":
    address, folder, steps, pause_s, every, workers = sys.argv[1:]
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=address)
    TorchTrainer(
        train_loop,
        train_loop_config={
            "out": str(Path(folder, "steps")), "steps": int(steps), "pause_s": float(pause_s), "every": int(every),
        },
        scaling_config=ScalingConfig(num_workers=int(workers)),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=-1)),
    ).fit()  # fmt: skip
