"""What can fail on any machine, whatever room meets it: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import ClusterError, DeviceError, Problem, StorageError, TransientStorageError

NO_FOLDER = Problem(
    "files.no_folder",
    StorageError,
    "{folder!r}: no folder can be made there ({got})",
    "set TMPDIR to a folder that you can write",
    cause="the folder for temporary files is not writable, or its disk is full",
    advice="`TMPDIR` with a folder that you can write",
)

# --- kinds of failure that are not the job's --------------------------------------------------------------------

STORAGE_FAILED = Problem(
    "failure.storage",
    TransientStorageError,
    "{what} ({where}): {kind}: {got}",
    shown="a disk or quota is full (…): …`, `a disk or network file system failed (…): …`, `a network file system lost track of a "
    "file (…): …`, `a service cannot be reached (…): …",
    cause="storage or a service failed for a reason that may pass; [retried after pauses](#kinds-of-failure) first",
    advice="free the disk, or restart the service",
)

DEVICE_FAILED = Problem(
    "failure.device",
    DeviceError,
    "{what} ({where}): {kind}: {got}",
    shown="an uncorrectable memory error of the GPU (…): …`, `a GPU failed in a kernel (…): …`, `a GPU is gone (…): …`, `a GPU "
    "failed (XID) (…): …`, `cuDNN failed (…): …",
    cause="a GPU or its driver failed; [retried](#kinds-of-failure) first, without a node on which it happens twice",
    advice="look at the node with `nvidia-smi -q` and `dmesg`",
)

NO_MEMORY = Problem(
    "failure.memory",
    ClusterError,
    "{what} ({where}): {kind}: {got}",
    shown="the node has no memory left (…): …`, `the node's shared memory is full (…): …`, `the node starts no more threads (…): "
    "…`, `another process uses the GPU (…): …",
    cause="a node, or a GPU that another process uses too, has no memory, threads or processes left; [retried](#kinds-of-failure) first",
    advice="less beside the run on that node, or more CPUs for each worker (`workers.cpus_each`), so that fewer share it",
)

PEER_FAILED = Problem(
    "failure.peer",
    ClusterError,
    "{what} ({where}): {kind}: {got}",
    shown="the other workers cannot be reached (…): …`, `NCCL failed (…): …`, `a collective timed out (…): …",
    cause="another worker was lost, or the network to it; [retried](#kinds-of-failure) first",
    advice="if it keeps happening, look at `error.txt` and at the network between the nodes",
)
