"""The first steps of a spec, trained in a process of its own and written down: one side of a comparison of two states of the code.

It is run by its path, with the Lockstep and the job of the state that is compared, which may be older than this file: so it
uses little of either, and what it writes is read by others. `python -P guard_worker.py REQUEST`, a JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

ROWS, EVALUATIONS, FIELDS, LOOK = "steps.parquet", "evaluations.parquet", "fields.json", "look.json"
"""What it leaves in the folder `out`."""

UNFIT = 3
"""Exit code where this state's Lockstep lacks what this file needs."""


def main(request: str) -> int:
    """Train as the request says: `spec`, `overrides`, `steps`, `out`, `rank` of `ranks`, `look`, a step and a micro-batch, or null, and the folders `tree`
    of this state and `root` of the working tree.
    """
    try:
        from lockstep.errors import LockstepError
        from lockstep.proof.replaying import replay_here
    except ImportError as error:
        sys.stderr.write(f"its Lockstep cannot take steps again: {error}\n")
        return UNFIT
    sys.path.insert(0, str(Path.cwd()))
    options = json.loads(request)
    try:
        _train(options, replay_here)
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if (foreign := _from_elsewhere(Path(options["tree"]), Path(options["root"]))) is not None:
        sys.stderr.write(f"it imports {foreign}, which is the working tree's and not its own\n")
        return UNFIT
    return 0


def _from_elsewhere(tree: Path, root: Path) -> str | None:
    """A file of the working tree that was imported though this state has another one, as by an absolute path or an editable installation."""
    for name, module in sorted(sys.modules.items()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if name == "__main__" or not isinstance(file, str):
            continue
        path = Path(file).resolve()
        if not path.is_relative_to(root) or any(map(path.is_relative_to, (tree, Path(sys.prefix).resolve()))):
            continue
        counterpart = tree / path.relative_to(root)
        if not counterpart.is_file() or counterpart.read_bytes() != path.read_bytes():
            return str(path)
    return None


def _train(request: dict[str, Any], replay_here: Any) -> None:
    from lockstep.checkpoint.runs.run_folder import Replay
    from lockstep.checks.start_checks import find_initial_weights
    from lockstep.communication.group import Group, local_device
    from lockstep.proof.operator_trace import Microscope
    from lockstep.record.ledger.tables import write_evaluations, write_parquet
    from lockstep.spec.loading import load_spec

    spec = find_initial_weights(load_spec(Path(request["spec"]), request["overrides"], uri="off"))
    out, look = Path(request["out"]), request["look"]
    microscope = None if look is None else Microscope(look[0] - 1, look[1])
    replay = Replay("", spec.checkpoint.storage, 0, request["steps"], None, microscope)
    if request["ranks"] == 1:
        replayed = replay_here(spec, replay, _Unwatched())
    else:
        with _grouped(out, request["rank"], request["ranks"]):
            replayed = replay_here(spec, replay, _Unwatched(), Group.join(local_device(spec)))
    if request["rank"] > 0:
        return
    write_parquet([replayed.steps[step] for step in sorted(replayed.steps)], out / ROWS)
    write_evaluations(
        [replayed.evaluations[step] for step in sorted(replayed.evaluations)], out / EVALUATIONS
    )
    (out / FIELDS).write_text(json.dumps(dict(replayed.fields), default=str), encoding="utf-8")
    look_document = None if microscope is None else asdict(microscope.look)
    (out / LOOK).write_text(json.dumps(look_document), encoding="utf-8")


@contextmanager
def _grouped(out: Path, rank: int, ranks: int) -> Iterator[None]:
    """The processes of this side as one group, which meet by a file."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Unwatched:
    """Takes all rows: no row makes the steps that follow unnecessary."""

    def row(self, row: Any) -> None: ...

    def enough(self) -> bool:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
