"""What can be wrong with a run on Ray and its attempts: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import ClusterError, DriftError, JobError, Problem, RecordError, SilentError, SpecError

CHAOS = Problem(
    "chaos.form",
    SpecError,
    "chaos: got {got!r}, wanted target:rate such as worker:0.02, the chance at each step of killing one of {wanted}",
    cause="a wrong `--chaos`",
    advice="follow the message",
)

# --- room for workers -------------------------------------------------------------------------------------------

TOO_SMALL = Problem(
    "placement.too_small",
    SpecError,
    "workers.min: got {got} workers of {need} each, but the cluster has {have}, enough for {fit}",
    "lower workers.min or workers.cpus_each, or add nodes",
    cause="the cluster is too small, or others use it",
    advice="lower `workers.min` or `workers.cpus_each`, or add nodes; no bits depend on them",
)

WAITED = Problem(
    "placement.waited",
    ClusterError,
    "{got}, and no more room came in {seconds} s (faults.wait_for_workers_s)",
    "{remedy}",
    shown="workers.min: got … workers of … each, but the cluster has …, and no more room came in … s (faults.wait_for_workers_s); …",
    cause="fewer workers than `workers.min` for too long",
    advice="add nodes, or lower `workers.min`; then `lockstep resume RUN_ID`",
)

WAIT_SIGNALLED = Problem(
    "placement.signalled",
    ClusterError,
    "{got}, and a signal ended the wait for workers after {seconds} s",
    "{remedy}",
    shown="workers.min: got … workers of … each, but the cluster has …, and a signal ended the wait for workers after … s; …",
    cause="a signal came while room for workers was waited for; the run is `KILLED`",
    advice="`lockstep resume RUN_ID`",
)

# --- what all nodes have to see ---------------------------------------------------------------------------------

OTHER_FOLDER = Problem(
    "nodes.other_folder",
    SpecError,
    "{field}: {folder!r} on this node is another folder on {node}, where workers run",
    "set {field} to a folder that all nodes share{store}",
    shown="<field>: '…' on this node is another folder on …, where workers run; …",
    cause="`record.folder`, or the folder of `checkpoint.storage`, is not shared by all nodes",
    advice="a folder that all nodes share, or an object store for `checkpoint.storage`",
)

NODE_FAILED = Problem(
    "nodes.failed",
    ClusterError,
    "{node} could not say whether it sees the run's folders: {got}",
    "look at the nodes with ray list nodes",
    cause="a node that starts no process, as where the job's environment cannot be installed there",
    advice="what the message says; look at the node",
)

NODE_SILENT = Problem(
    "nodes.silent",
    ClusterError,
    "{nodes} did not say within {seconds} s (faults.wait_for_workers_s) whether the run's folders are seen there",
    "look at the nodes with ray list nodes",
    cause="the node starts no process, or still installs the job's environment",
    advice="look at the nodes; a longer `faults.wait_for_workers_s`",
)

# --- an attempt ends --------------------------------------------------------------------------------------------

RANK_LOST = Problem(
    "attempt.rank_lost",
    ClusterError,
    "rank {rank} of {workers} was lost: {got}",
    cause="a worker or its node is gone; [retried](attempts.md)",
    advice="if it keeps happening, look at `error.txt` and Ray's logs",
)

JOINED_LOST = Problem(
    "attempt.joined_lost",
    ClusterError,
    "worker {worker}, which had joined, was lost: {got}",
    cause="as for a rank",
    advice="as for a rank",
)

SEVERAL_LOST = Problem(
    "attempt.several_lost",
    ClusterError,
    "{got}",
    shown="rank … of … was lost: …; rank … of … was lost: …",
    cause="several workers are gone; [retried](attempts.md)",
    advice="as for a rank",
)

LOST_AT_START = Problem(
    "attempt.lost_at_start",
    ClusterError,
    "one of {workers} workers was lost as it was started: {got}",
    cause="its process was killed, often because memory ran out, or its node was lost; [retried](attempts.md)",
    advice="as for a rank",
)

NODE_MEMORY = Problem(
    "attempt.node_memory",
    ClusterError,
    "rank {rank} of {workers} was killed: its node ran out of memory",
    "lower data.loader_processes, or raise workers.cpus_each so that fewer share a node; in a new run, a lower batch.micro "
    "or activation_checkpointing=true takes less as well",
    cause="Ray or the kernel killed the worker, because its node ran out of memory",
    advice="what the message suggests; the first two change no bits",
)

ATTEMPT_ENDED = Problem(
    "attempt.ended",
    ClusterError,
    "the attempt on {workers} workers ended: {got}",
    cause="Ray ended the attempt",
    advice="`lockstep resume RUN_ID`",
)

NO_RESULT = Problem(
    "attempt.no_result",
    ClusterError,
    "the workers ended without a result",
    cause="Ray ended the attempt and gave no reason",
    advice="`lockstep resume RUN_ID`",
)

STILL_THERE = Problem(
    "attempt.still_there",
    ClusterError,
    "Ray did not end the workers of attempt {attempt} within {seconds} s",
    "look at the nodes with ray status, then resume the run",
    cause="a node of the cluster hangs",
    advice="`ray status`, then resume the run",
)

NO_PROGRESS = Problem(
    "attempt.no_progress",
    SilentError,
    "no rank made progress for {seconds} s, so the attempt was ended (faults.longest_silence_s is the shortest time for that)",
    "{where}",
    cause="a rank hangs",
    advice="the stacks in the file that the message names",
)

NO_FIRST_STEP = Problem(
    "attempt.no_first_step",
    SilentError,
    "no first step within {seconds} s (faults.longest_start_s), so the attempt was ended in its stage {stage}",
    "{where}",
    cause="the job's import or its data hang, or others use the cluster; [the stages](attempts.md#what-a-restart-takes) say how far it got",
    advice="the stacks in the file that the message names; a larger `faults.longest_start_s` if the data take that long",
)

# --- the job is at fault ----------------------------------------------------------------------------------------

REPEATED = Problem(
    "attempt.repeated",
    JobError,
    "step {step}, micro-batch {micro_batch} fails in the same way on different workers ({workers}), so it is the job or its data: {got}",
    "{file} in the run's folder takes it again, and names its samples",
    cause="a kernel or a sample that breaks any device, or takes more memory than any has",
    advice="run the file that the line names: it takes the step again",
)

FAULT_OF_JOB = Problem(
    "attempt.fault_of_job",
    DriftError,
    "{got}; in attempt {attempt} it was {earlier}: the same step on other workers, so it is the job that is not deterministic there",
    "look for an operator that torch wrongly considers deterministic, or state that the job keeps",
    shown="after step … had other … in attempt … it was …: the same step on other workers, so it is the job that is not deterministic there; …",
    cause="workers differ at the same step, in two attempts that have no digests in common, or in three on different machines",
    advice="the tensor that the line names: an operator that torch wrongly considers deterministic, or state that the job keeps",
)

# --- the mailbox and the recorder -------------------------------------------------------------------------------

MAILBOX_LOST = Problem(
    "attempt.mailbox_lost",
    ClusterError,
    "the run's mailbox was lost: {got}",
    cause="its process was stopped or killed, or the driver's node has come to a standstill; [retried](attempts.md)",
    advice="look at the driver's node",
)

MAILBOX_UNREACHABLE = Problem(
    "attempt.mailbox_unreachable",
    SilentError,
    "the run's mailbox cannot be reached",
    cause="the same, or a cut network, as a worker sees it",
    advice="look at the driver's node, and at the network",
)

RECORDER_LOST = Problem(
    "recorder.lost",
    ClusterError,
    "{got} before the run existed in its store",
    "look whether a run was begun there, then give the command again",
    shown="the recorder was lost (…) before the run existed in its store; …",
    cause="its process was killed before there was a run: another recorder might begin a second one",
    advice="start the run again",
)

RECORDERS_LOST = Problem(
    "recorder.lost_again",
    ClusterError,
    "{got}, as {count} before it were",
    "look at the driver's node",
    shown="the recorder was lost (…), as … before it were; …",
    cause="its process was killed repeatedly, often because memory ran out",
    advice="look at the driver's node, then `lockstep resume RUN_ID`",
)

UNWRITTEN = Problem(
    "recorder.unwritten",
    RecordError,
    "record: its recorder did not write what is left within {seconds} s",
    "`lockstep record sync {run}` sends what the run's folder has",
    cause="the store is slow or does not answer, at the end of a run",
    advice="`lockstep record sync RUN`",
)
