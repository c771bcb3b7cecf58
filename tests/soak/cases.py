"""What a soak tries: a program, how its attempts go, and whom it loses. A case is plain data, drawn from a seed, and can be made smaller."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from tests.soak.programs import LAYERS, PROGRAMS

Case = dict[str, Any]
"""`spec`: the run's, without where it is saved. `attempts`: one after another, each on so many workers, until it is killed or stopped.
`changes`: the same run on one group that loses and gains workers."""

OUTLIVED = ("none", "optimizer")
"""The values of `sharding` with which a run goes on in memory when it loses a worker: the second one with mirrors."""

FALLS = (
    "forward", "send whole", "send buffers", "send to one", "gather", "gather outputs", "update", "note", "write", "receipt", "commit",
)  # fmt: skip
"""Places of `tests.distributed.survivors` at which a worker may be lost; one that a run never comes to loses nobody."""


def draw(seed: int) -> Case:
    """The case of this seed, always the same."""
    chance = random.Random(seed)
    program = chance.choices(PROGRAMS, [5, 2, 2, 2, 2, 2])[0]
    global_batch = chance.choice([4, 6, 8, 12, 16])
    micro = chance.choice(
        [n for n in range(1, global_batch + 1) if global_batch % n == 0 and n < global_batch]
    )
    if program.__name__ == "Whole":
        micro = max(micro, 2) if global_batch % 2 == 0 else micro
    layers = chance.choices(LAYERS, k=chance.randrange(4))
    if micro == 1 or global_batch % micro:
        layers = [name for name in layers if name != "batch norm"]
    params = {
        "samples": chance.randrange(20, 50),
        "held_out": chance.choice([0, 5, 7, 13]),
        "width": chance.choice([3, 8, 11]),
        "layers": layers,
        "augment": chance.random() < 0.3,
        "weighted": chance.random() < 0.3 and program.__name__ in {"Drawn", "Followed"},
        "frozen": chance.random() < 0.2,
        "noise": chance.random() < 0.3,
        "optimizer": chance.choice(["", "", "", "groups", "rmsprop"])
        if program.__name__ not in {"Phased", "Tables"}
        else "",
        "metric": chance.random() < 0.3,
    }
    steps = chance.randrange(4, 10)
    spec: Case = {
        "job": {"use": f"tests.soak.programs:{program.__name__}", "params": params},
        "seed": chance.randrange(1000),
        "batch": {"global": global_batch, "micro": micro},
        "length": {"steps": steps},
        "precision": chance.choice(["fp32", "fp32", "bf16", "fp16"]),
        "data": {"shuffle": chance.choice(["full", "hashed", "none"]), "drop_last": "batch norm" in layers or chance.random() < 0.5},
        "evaluate": {"every": {"steps": chance.randrange(1, 6)}},
    }  # fmt: skip
    if "complex" in layers and spec["precision"] == "fp16":  # which has no scale for complex gradients
        spec["precision"] = "bf16"
    if not params["optimizer"]:
        spec["optimizer"] = {"name": chance.choice(["adamw", "adam", "sgd"]), "lr": 0.01}
    optional = {
        "clip_norm": 0.5,
        "ema": 0.6,
        "schedule": chance.choice([{"name": "cosine", "warmup_steps": 2}, {"name": "step", "every": 2}]),
    }
    spec |= {name: value for name, value in optional.items() if chance.random() < 0.4}
    if params["held_out"] and chance.random() < 0.3:
        spec["early_stop"] = {"metric": "eval/loss", "patience": chance.randrange(1, 4)}
    most = min(4, global_batch // micro)
    _change_batches(chance, spec, global_batch, micro, steps)
    return {
        "spec": spec,
        "attempts": _attempts(chance, steps, most),
        "changes": _changes(chance, steps, most),
        "save_every": chance.randrange(1, 4),
    }


def _change_batches(
    chance: random.Random, spec: dict[str, Any], global_batch: int, micro: int, steps: int
) -> None:
    """Some runs with sizes of the global batch that rise or fall, and some with samples of like lengths, or micro-batches bounded by tokens."""
    batch, data = spec["batch"], spec["data"]
    if chance.random() < 0.3:
        data |= {"shuffle": "by_length", "window": chance.randrange(1, 4)}
        layers = spec["job"]["params"]["layers"]
        if "batch norm" not in layers and chance.random() < 0.6:
            batch["tokens"] = chance.randrange(13, 60)  # no sample is longer than 13
    if chance.random() < 0.3:
        sizes: list[dict[str, int]] = []
        ends = sorted(chance.sample(range(1, steps), min(steps - 1, chance.randrange(1, 3))))
        by_samples = "tokens" not in batch and chance.random() < 0.5
        for end in ends:
            until = {"until_samples": end * global_batch // 2 + 1} if by_samples else {"until_steps": end}
            sizes.append({"size": micro * chance.randrange(1, global_batch // micro + 1), **until})
        batch["global"] = [*sizes, {"size": global_batch}]


def _attempts(chance: random.Random, steps: int, most: int) -> list[Case]:
    attempts = []
    for number in range(chance.randrange(1, 4)):
        workers = chance.randrange(1, most + 1)
        attempt: Case = {
            "workers": workers,
            "sharding": chance.choice(["none", "none", "optimizer", "full"]),
            "loader_processes": chance.choice([0, 0, 0, 1, 2]),
        }
        if number or chance.random() < 0.5:
            attempt["stop_after"] = chance.randrange(1, steps + 1)
        else:
            attempt["fall"] = [
                chance.randrange(workers), chance.randrange(1, steps + 1), chance.choice(FALLS), chance.randrange(1, 4),
            ]  # fmt: skip
        attempts.append(attempt)
    last = {
        "workers": chance.randrange(1, most + 1),
        "sharding": chance.choice(["none", "optimizer", "full"]),
        "loader_processes": 0,
    }
    return [*attempts, last]  # fmt: skip


def _changes(chance: random.Random, steps: int, most: int) -> Case | None:
    if most < 2 or chance.random() < 0.3:
        return None
    workers = chance.randrange(2, most + 1)
    falls = [
        [
            n,
            chance.randrange(1, steps + 1),
            chance.choice(FALLS),
            chance.randrange(1, 4),
            chance.random() < 0.2,
        ]
        for n in chance.sample(range(workers), chance.randrange(0, workers))
    ]
    joining = chance.randrange(0, most - workers + 1) if most > workers else 0
    sharding = chance.choice(OUTLIVED)
    return {
        "workers": workers,
        "falls": falls if sharding == "none" else falls[:1],  # a worker may be lost with its mirror
        "joining": [chance.randrange(1, steps), joining] if joining and steps > 1 else None,
        "sharding": sharding,
    }


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest cuts first."""

    def changed(*path: Any, to: Any) -> Case:
        result = copy.deepcopy(case)
        target = result
        for name in path[:-1]:
            target = target[name]
        if to is None:
            del target[path[-1]]
        else:
            target[path[-1]] = to
        return result

    if case["changes"] is not None and case["attempts"]:
        yield {**case, "changes": None}
        yield {**case, "attempts": []}
    for number in range(len(case["attempts"])):
        yield changed("attempts", number, to=None)
    for number, attempt in enumerate(case["attempts"]):
        for name, plain in (("sharding", "none"), ("loader_processes", 0), ("workers", 1)):
            if attempt[name] != plain and not (name == "workers" and "fall" in attempt):
                yield changed("attempts", number, name, to=plain)
    if case["changes"] is not None:
        for number in range(len(case["changes"]["falls"])):
            yield changed("changes", "falls", number, to=None)
        if case["changes"]["joining"]:
            yield {**case, "changes": {**case["changes"], "joining": None}}
        if case["changes"]["sharding"] != "none":
            yield changed("changes", "sharding", to="none")
    spec = case["spec"]
    for name in ("early_stop", "ema", "schedule", "clip_norm"):
        if name in spec:
            yield changed("spec", name, to=None)
    if isinstance(spec["batch"]["global"], list):
        yield changed("spec", "batch", "global", to=spec["batch"]["global"][-1]["size"])
    if "tokens" in spec["batch"]:
        yield changed("spec", "batch", "tokens", to=None)
    elif spec["data"]["shuffle"] == "by_length":
        yield changed("spec", "data", "shuffle", to="full")
    if spec["precision"] != "fp32":
        yield changed("spec", "precision", to="fp32")
    params = spec["job"]["params"]
    for number in range(len(params["layers"])):
        yield changed("spec", "job", "params", "layers", number, to=None)
    for name in ("augment", "weighted", "frozen", "noise", "metric"):
        if params[name]:
            yield changed("spec", "job", "params", name, to=False)
    if params["optimizer"]:
        yield changed("spec", "job", "params", "optimizer", to="")
    if params["held_out"] and "early_stop" not in spec:
        yield changed("spec", "job", "params", "held_out", to=0)
    if spec["length"]["steps"] > 2:
        yield changed("spec", "length", "steps", to=spec["length"]["steps"] - 1)
