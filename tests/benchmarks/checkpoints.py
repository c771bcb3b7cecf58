"""What a checkpoint costs the training loop, beside a plain synchronous `torch.save` of the same state. Run by `make bench`.

The state is a model's and its AdamW's, 500 MB in all by default. In each round, in turn: one memory copy of the state
into memory that is there, the pause of `AsyncSaver.save`, and `torch.save` into the same folder followed by fsync. Then
steps of plain matrix products, with and without a save being written; and loading, with every hash compared.

    python -m tests.benchmarks.checkpoints [--megabytes 500] [--tensors 150] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.reader import checkpoints, load_newest, verify
from lockstep.checkpoint.runs.run_folder import RunFolder
from lockstep.checkpoint.saver import AsyncSaver
from lockstep.checkpoint.storage.opening import open_storage

EVERY_S = 30.0
"""The cadence that the share of wall time is told for."""


def trained(megabytes: float, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of so many parameters that, with AdamW's two averages, comes to so many megabytes."""
    numel = int(megabytes * 1e6 / 4 / 3 / tensors)
    model = nn.ParameterList([torch.randn(numel) for _ in range(tensors)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def taken(action: Callable[[], Any]) -> float:
    """Seconds of `action`."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def torch_saved(state: dict[str, Any], path: Path) -> None:
    """The customary way: the loop waits until the file is on the disk."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state.detach()]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for value in inner for tensor in tensors_of(value)]


def steps_until(over: Callable[[], bool], least: int = 0) -> list[float]:
    """Seconds of each step of a plain loop, as long as something goes on."""
    a = torch.randn(512, 512)
    times: list[float] = []
    while len(times) < least or not over():
        times.append(taken(lambda: [a @ a for _ in range(4)]))
    return times


def measure(megabytes: float, tensors: int, rounds: int) -> dict[str, Any]:
    model, optimizer = trained(megabytes, tensors)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    every = tensors_of(state)
    into = [torch.empty_like(tensor) for tensor in every]
    copies, pauses, written, saves, quiet, busy, loads, verifies = ([] for _ in range(8))  # type: ignore[var-annotated]
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        run = RunFolder.create(open_storage(folder), "run")
        saver = AsyncSaver(run.claim())
        saver.save(0, state)  # makes the buffers
        saver.wait()
        for step in range(1, rounds + 1):
            copies.append(taken(lambda: [kept.copy_(own) for kept, own in zip(into, every, strict=True)]))
            quiet.append(median(steps_until(lambda: True, least=50)))
            pauses.append(sum(saver.save(step, state)))
            busy.append(median(steps_until(lambda: saver.wait(0.0))))
            saver.wait()
            assert saver.failure is None, saver.failure
            assert saver.last is not None
            written.append(saver.last.written_s)
            saves.append(taken(lambda: torch_saved(state, Path(folder, "plain.pt"))))
            loads.append(taken(lambda: load_newest(run, print)))
            verifies.append(taken(lambda: verify(checkpoints(run)[0])))
        saver.close()
    return {
        "megabytes": sum(tensor.nbytes for tensor in every) / 1e6,
        "tensors": len(every),
        "rounds": rounds,
        "memory_copy_s": median(copies),
        "pause_s": median(pauses),
        "pause_per_memory_copy": median(p / c for p, c in zip(pauses, copies, strict=True)),
        "torch_save_s": median(saves),
        "pause_per_torch_save": median(p / s for p, s in zip(pauses, saves, strict=True)),
        "share_of_wall_time_every_30_s": median(pauses) / EVERY_S,
        "background_write_s": median(written),
        "step_while_writing_per_quiet_step": median(b / q for b, q in zip(busy, quiet, strict=True)),
        "load_and_verify_s": median(loads),
        "verify_s": median(verifies),
    }


def told(result: dict[str, Any]) -> str:
    r = result
    return "\n".join(
        (
            f"state of {r['megabytes']:.0f} MB in {r['tensors']} tensors, {r['rounds']} rounds, medians",
            f"  pause of the loop     {1e3 * r['pause_s']:8.1f} ms   {r['pause_per_memory_copy']:.2f} of one memory copy (wanted 1), "
            f"{r['pause_per_torch_save']:.3f} of torch.save (wanted 0.1), {100 * r['share_of_wall_time_every_30_s']:.2f} % of the time at one each 30 s (wanted 1)",
            f"  one memory copy       {1e3 * r['memory_copy_s']:8.1f} ms",
            f"  torch.save and fsync  {1e3 * r['torch_save_s']:8.1f} ms",
            f"  background write      {1e3 * r['background_write_s']:8.1f} ms   a step meanwhile takes {r['step_while_writing_per_quiet_step']:.2f} of a quiet one",
            f"  load and verify       {1e3 * r['load_and_verify_s']:8.1f} ms   verify alone {1e3 * r['verify_s']:.1f} ms",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--tensors", type=int, default=150, help="parameters of the model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options.megabytes, options.tensors, options.rounds)
    print(told(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
