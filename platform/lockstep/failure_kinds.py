"""Kinds of failure, told apart by tables: what broke, and so whether another attempt can fix it. Pure.

| kind | what broke | what follows |
|---|---|---|
| peer | another worker, or the network between workers | another attempt |
| device | a GPU or its driver | another attempt; a node whose devices fail twice is left out |
| memory | the memory of a node, its threads and processes, or the memory of a GPU that others use as well | another attempt |
| storage | a disk, a network file system, an object store, or the way to it | another attempt, after a pause |
| job | anything else: it comes again however often it is tried | the run ends, unless `faults.max_job_errors` allows more |

The texts are those of CUDA (`cudaGetErrorString`), cuDNN, cuBLAS, NCCL (`ncclGetErrorString`), gloo, PyTorch and the NVIDIA
driver's XID messages. A text counts only in an exception of the kind in which the libraries raise it: a RuntimeError.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from lockstep import problems
from lockstep.errors import DataError, JobError, JobImportError, LockstepError, Problem, StorageError

Kind = Literal["peer", "device", "memory", "storage", "job"]


class Failure(NamedTuple):
    """A kind, and what broke in words. For what no table has, the kind is `job` and the words are empty."""

    kind: Kind
    description: str = ""


class Text(NamedTuple):
    """A failure that a library reports by a text: a regular expression, searched for without regard to case."""

    kind: Kind
    pattern: str
    description: str


NODE_MEMORY = "the node has no memory left"

OTHERS_MEMORY = "another process uses the GPU"

GPU_MEMORY = Failure("job", "the memory of the GPU")
"""A GPU has too little memory for the job."""

TEXTS = (
    # The job's own, though they come from a GPU: the same kernel on the same data fails again.
    Text("job", r"device-side assert triggered", "an assertion in a kernel"),
    Text("job", r"illegal memory access|misaligned address|illegal instruction", "a kernel's own access"),
    Text("job", r"invalid configuration argument|invalid device function|no kernel image", "a kernel"),
    Text("job", r"(?:CUDNN|CUBLAS)_STATUS_(?:BAD_PARAM|NOT_SUPPORTED|INVALID_VALUE)", "an argument"),
    Text("job", r"nccl\w*.*invalid (?:argument|usage)|ncclInvalid(?:Argument|Usage)", "an argument of NCCL"),
    # The memory of a GPU: the job's, unless another process holds part of it.
    Text("memory", r"out of memory.*process \d+ has [\d.]+ \w+ memory in use", OTHERS_MEMORY),
    Text(GPU_MEMORY.kind, r"(?:CUDA|HIP) out of memory|CUDA error: out of memory", GPU_MEMORY.description),
    # NCCL allocates its buffers beside torch: what is out of memory is this rank's GPU, not a peer.
    Text(
        GPU_MEMORY.kind,
        r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:calloc|malloc)",
        GPU_MEMORY.description,
    ),
    # Devices and their driver.
    Text(
        "device",
        r"uncorrectable (?:ECC|NVLink) error|double.bit ECC",
        "an uncorrectable memory error of the GPU",
    ),
    Text("device", r"unspecified launch failure", "a GPU failed in a kernel"),
    Text("device", r"hardware stack error|launch timed out and was terminated", "a GPU failed in a kernel"),
    Text("device", r"fallen off the bus|GPU is lost|GPU requires a reset", "a GPU is gone"),
    Text(
        "device",
        r"\bXid\b[^,\n]*[:,]?\s(?:48|62|63|64|74|79|92|94|95|119|120|140|143)\b",
        "a GPU failed (XID)",
    ),
    Text(
        "device",
        r"CUDA error: (?:unknown error|initialization error|driver shutting down|OS call failed)",
        "a GPU or its driver",
    ),
    Text("device", r"busy or unavailable|no CUDA-capable device", "no GPU to be had"),
    Text(
        "device",
        r"(?:system not yet initialized|driver version is insufficient|system has unsupported display driver)",
        "the GPU's driver",
    ),
    Text(
        "device",
        r"CUDNN_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED|NOT_INITIALIZED|MAPPING_ERROR)",
        "cuDNN failed",
    ),
    Text(
        "device",
        r"CUBLAS_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED|NOT_INITIALIZED|ALLOC_FAILED|MAPPING_ERROR)",
        "cuBLAS failed",
    ),
    # Peers and the network between them. After the devices: an NCCL error may quote the CUDA error behind it.
    Text(
        "peer",
        r"\bgloo/|connection (?:closed|reset) by (?:remote )?peer",
        "the other workers cannot be reached",
    ),
    Text(
        "peer",
        r"nccl(?:System|Remote|Internal|UnhandledCuda)Error|nccl error|NCCL communicator was aborted",
        "NCCL failed",
    ),
    Text(
        "peer",
        r"collective operation timeout|timed out waiting \d+ ?ms for \w+ operation",
        "a collective timed out",
    ),
    Text(
        "peer",
        r"client socket has (?:timed out|failed to connect)|recvValue(?:WithTimeout)? failed|failed to recv, got \d+ bytes",
        "the rendezvous cannot be reached",
    ),
    # The memory of a node.
    Text(
        "memory",
        r"DefaultCPUAllocator: (?:can't|not enough) .*memory|cannot allocate memory|std::bad_alloc",
        NODE_MEMORY,
    ),
    Text(
        "memory",
        r"unable to (?:mmap|allocate|resize) .*(?:shared memory|shm)|no space left on device \(28\).*shm",
        "the node's shared memory is full",
    ),
    Text("memory", r"^can't start new thread$", "the node starts no more threads"),
)
"""The first match counts."""

ERRNOS: dict[int, Failure] = {
    **dict.fromkeys((errno.EIO, errno.EREMOTEIO), Failure("storage", "a disk or network file system failed")),
    errno.ESTALE: Failure("storage", "a network file system lost track of a file"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), Failure("storage", "a disk or quota is full")),
    **dict.fromkeys(
        (
            errno.ETIMEDOUT,
            errno.ECONNRESET,
            errno.ECONNREFUSED,
            errno.ECONNABORTED,
            errno.EPIPE,
            errno.EHOSTUNREACH,
            errno.EHOSTDOWN,
            errno.ENETUNREACH,
            errno.ENETDOWN,
            errno.ENETRESET,
        ),
        Failure("storage", "a service cannot be reached"),
    ),
    errno.ENOMEM: Failure("memory", NODE_MEMORY),
    errno.EAGAIN: Failure("memory", "the node starts no more processes"),  # fork's
}
"""Failures by the number of an OSError. All others, such as ENOENT and EACCES, are the job's."""

NAMES: dict[str, Failure] = {
    **dict.fromkeys(
        (
            "botocore.exceptions.EndpointConnectionError",
            "botocore.exceptions.ConnectionClosedError",
            "botocore.exceptions.ConnectTimeoutError",
            "botocore.exceptions.ReadTimeoutError",
            "requests.exceptions.ConnectionError",
            "requests.exceptions.Timeout",
            "urllib3.exceptions.ProtocolError",
            "urllib3.exceptions.TimeoutError",
            "aiohttp.client_exceptions.ClientConnectionError",
            "builtins.ConnectionError",
            "builtins.TimeoutError",
        ),
        Failure("storage", "a service cannot be reached"),
    ),
    "builtins.MemoryError": Failure("memory", NODE_MEMORY),
    "torch.distributed.DistError": Failure("peer", "the other workers cannot be reached"),
    "torch._C._DistError": Failure("peer", "the other workers cannot be reached"),
}
"""Failures by the full name of the exception's class or of one of its base classes."""

_WATCHDOG = re.compile(
    r"(?:\[[^\[\]]*Rank \d+\] )?"
    r"(?:Watchdog caught collective operation timeout|Process group watchdog thread terminated with exception): .*"
)


def said_by_watchdog(text: str) -> str | None:
    """The first line in `text` with which NCCL's watchdog ends its process, by SIGABRT: nothing in it can raise an error. None without one."""
    match = _WATCHDOG.search(text)
    return match[0][:300] if match else None


_NUMBER = re.compile(r"\[Errno (\d+)\]")
_NUMBER_OF_RUST = re.compile(r"\(os error (\d+)\)")


def kind_of(error: BaseException) -> Failure:
    """The kind of failure of an exception, or of one that it was raised `from`."""
    for link in causes(error):
        failure = _own_kind(link)
        if failure is not None:
            return failure
    return Failure("job")


def causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and its causes, each once: one may be its own. Contexts are left out: an error that was handled is not why a later one was raised."""
    link: BaseException | None = error
    visited = set[int]()
    while link is not None and id(link) not in visited:
        yield link
        visited.add(id(link))
        link = link.__cause__


def _own_kind(error: BaseException) -> Failure | None:
    if isinstance(error, RuntimeError):
        text = " ".join(str(error).split())
        for rule in TEXTS:
            if re.search(rule.pattern, text, re.IGNORECASE):
                return Failure(rule.kind, rule.description)
    if isinstance(error, OSError):
        number = error.errno
        if number is None:  # an error of a loader process arrives as a new one that quotes it
            quoted = _NUMBER.findall(str(error))
            number = int(quoted[-1]) if quoted else None
        if number is not None:
            return ERRNOS.get(number)
    if type(error).__name__ == "SafetensorError" and (match := _NUMBER_OF_RUST.search(str(error))):
        return ERRNOS.get(int(match[1]))
    for kind in type(error).__mro__:
        failure = NAMES.get(f"{kind.__module__}.{kind.__qualname__}")
        if failure is not None:
            return failure
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the processor or on a GPU."""
    return kind_of(error).description in {GPU_MEMORY.description, OTHERS_MEMORY, NODE_MEMORY}


def infrastructure_error(error: BaseException, where: str) -> LockstepError | None:
    """A one-line error for a failure that is not the job's; None for one that is. `where` is the place in the run."""
    kind, description = kind_of(error)
    if kind == "job":
        return None
    text = " ".join(str(error).split())[:300]
    failed: LockstepError = _BY_KIND[kind](what=description, where=where, kind=type(error).__name__, got=text)
    return failed


_BY_KIND: dict[Kind, Problem[Any]] = {
    "storage": problems.STORAGE_FAILED,
    "device": problems.DEVICE_FAILED,
    "memory": problems.NO_MEMORY,
    "peer": problems.PEER_FAILED,
}


def may_pass(error: LockstepError) -> LockstepError:
    """An error of the job, its data or the storage whose cause is the machine's, as the error of that kind; every other error unchanged.

    A ResumeError stays one: each later attempt would resume in the same way.
    """
    if type(error) not in (JobError, JobImportError, DataError, StorageError):
        return error
    problem = _BY_KIND.get(kind_of(error).kind)
    return error if problem is None else error.as_kind(problem.error).with_traceback(error.__traceback__)
