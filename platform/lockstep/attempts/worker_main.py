"""What each Ray Train worker runs: it joins the group, loads the job and hands over to `fit`."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch

from lockstep.attempts.recorder_actor import RemoteRecord
from lockstep.attempts.standby import imported_at
from lockstep.attempts.watchdog import listening
from lockstep.attempts.worker_output import output_told
from lockstep.errors import LockstepError
from lockstep.job.loading import load_job
from lockstep.record.system import sampled
from lockstep.spec.fields import validate
from lockstep.training.failure import as_lockstep_error
from lockstep.training.group import Group
from lockstep.training.loop import RunRecord, fit
from lockstep.training.no_record import NoRecord


def system_recorded(recorder: Any) -> AbstractContextManager[None]:
    """Sample the node that this worker is on, where it is the first one there."""
    place = ray.train.get_context()
    if place.get_local_rank() > 0:
        return nullcontext()
    return sampled(partial(recorder.system.remote, f"node-{place.get_node_rank()}"))


def _tell_output(recorder: Any, attempt: int, rank: int, stream: str, text: str) -> None:
    ray.get(recorder.output.remote(f"attempt-{attempt}-rank-{rank}-{stream}", text))


def worker_main(config: dict[str, Any]) -> None:
    """Train as one worker. `config`: the spec's document, the recorder actor, the folder that it was started in, and which attempt of which run this is."""
    arrived, folder = time.time(), config["folder"]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    group = Group.join(ray.train.torch.get_device())
    recorder, attempt = config["recorder"], config["origin"].attempt
    recorder.joined.remote(attempt, listening(group.rank, imported_at()))
    if group.rank == 0:
        recorder.moments.remote(attempt, {"arrival": arrived})
    record: RunRecord = RemoteRecord(recorder, Path(folder), attempt) if group.rank == 0 else NoRecord()
    try:
        spec = validate(config["spec"])
        with system_recorded(recorder), output_told(partial(_tell_output, recorder, attempt, group.rank)):
            fit(spec, load_job(spec.job.use, spec.job.params), group, record, config["origin"])
    except Exception as error:
        known = error if isinstance(error, LockstepError) else as_lockstep_error(error, f"rank {group.rank}")
        ray.get(recorder.broke.remote(attempt, type(known)(str(known)), traceback.format_exc()))
        raise
