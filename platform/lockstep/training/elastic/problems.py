"""What can go wrong where the workers of a run form another group: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import ClusterError, Problem
from lockstep.training.elastic.errors import LeftError, RegroupError

NO_OTHER_GROUP = Problem(
    "elastic.no_other_group",
    RegroupError,
    "the workers could not form another group after step {step}",
    cause="one of them ended by itself meanwhile; [retried](attempts.md) from a checkpoint",
    advice="what the line before it says",
)

LEFT = Problem(
    "elastic.left",
    LeftError,
    "this worker leaves the run, which the others go on with",
    cause="fewer workers are wanted; in the log of that worker",
    advice="nothing",
)

OTHER_STATES = Problem(
    "elastic.other_states",
    ClusterError,
    "the workers of a new group hold different states after step {step}, and cannot go on",
    cause="the state changed on its way from one worker to another, memory or a processor of one of them is faulty, or `job.load_state_dict` is not the same on every rank; [retried](attempts.md) from a checkpoint",
    advice="if it happens again, make `job.load_state_dict` the same on every rank, or take the machine out",
)

OTHER_WORKER = Problem(
    "elastic.other_worker",
    ClusterError,
    "rank {rank}, which has just joined, has a different {got} than the others, and cannot train with them",
    cause="another version, source, processor or other data on its node; [retried](attempts.md) from a checkpoint",
    advice="use nodes of one kind, with the same code and data",
)
