"""Kinds of failure: real exceptions where they can be made here, the libraries' own texts where not."""

from __future__ import annotations

import errno
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch.utils.data import DataLoader, Dataset

from lockstep import problems
from lockstep.errors import (
    ClusterError,
    DataError,
    DeviceError,
    JobError,
    JobImportError,
    LockstepError,
    ResumeError,
    SpecError,
    StorageError,
    TransientStorageError,
)
from lockstep.failure_kinds import ERRNOS, TEXTS, Kind, infrastructure_error, kind_of, may_pass
from lockstep.training.failure import as_lockstep_error
from tests.ports import refusing_port


def reset_connection() -> None:
    """A peer that goes without a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there.close()
        with client:
            client.recv(1)


def full_disk() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x")


def broken_disk() -> None:
    """Address 0 of this process cannot be read: the kernel says EIO, as for a broken sector."""
    os.pread(os.open("/proc/self/mem", os.O_RDONLY), 1, 0)


def refused_connection() -> None:
    with refusing_port() as port:
        socket.create_connection(("127.0.0.1", port))


def timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:  # fmt: skip
        client.settimeout(0.01)
        client.recv(1)


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise OSError(errno.EIO, "Input/output error", "part-0.parquet")


def loader_process() -> None:
    """What a loader process raises comes as a new error that quotes it."""
    list(DataLoader(Broken(), num_workers=1))


def no_thread() -> None:
    """The kernel answers as it does when a machine has all the threads that it may have."""
    before = threading.stack_size(1 << 46)
    try:
        threading.Thread(target=print).start()
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (reset_connection, "storage"),
        (refused_connection, "storage"),
        (timeout, "storage"),
        (full_disk, "storage"),
        (broken_disk, "storage"),
        (loader_process, "storage"),
        (lambda: bytearray(1 << 62), "memory"),
        (lambda: torch.empty(1 << 58), "memory"),
        (no_thread, "memory"),
        (lambda: Path("/no/such/file").read_text(), "job"),
        (lambda: Path("/proc/1/mem/x").read_text(), "job"),
        (lambda: torch.ones(2) @ torch.ones(3), "job"),
        (lambda: [][0], "job"),
    ],
)
def test_real_exceptions(broken: object, kind: Kind) -> None:
    with pytest.raises(Exception) as caught:
        broken()  # type: ignore[operator]
    assert kind_of(caught.value).kind == kind


GLOO = """
import os, sys, torch, torch.distributed as dist
from lockstep.failure_kinds import kind_of
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
if rank == 1:
    os._exit(1)
try:
    while True:
        dist.all_reduce(torch.ones(4))
except Exception as error:
    print(kind_of(error).kind, type(error).__name__, " ".join(str(error).split()))
"""


@pytest.mark.scenario
def test_a_peer_that_dies_in_a_collective_of_gloo(tmp_path: Path) -> None:
    """The exception of the rank that lives on, from a real process group."""
    words = [sys.executable, "-c", GLOO]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "store")],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    out, err = ranks[0].communicate(timeout=240)
    ranks[1].communicate(timeout=240)
    assert out.startswith("peer "), (out, err)


# From the sources of CUDA, PyTorch, NCCL, gloo and the driver, as they come in an exception.
SAID: list[tuple[Kind, str]] = [
    ("device", "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some other API call"),
    ("device", "CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."),
    ("device", "CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    ("device", "No CUDA GPUs are available: no CUDA-capable device is detected"),
    ("device", "CUDA error: the launch timed out and was terminated"),
    ("device", "CUDA error: unknown error"),
    ("device", "NVRM: Xid (PCI:0000:06:00): 79, pid=1234, GPU has fallen off the bus."),
    ("device", "NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE)"),
    ("device", "NVRM: Xid (PCI:0000:3b:00): 94, Contained: SM (0x1)"),
    ("device", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ("device", "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm( handle, opa, opb, m, n, k)`"),
    ("peer", "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."),
    ("peer", "NCCL error in: NCCLUtils.hpp:317, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."),
    ("peer", "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST) ran for 600081 milliseconds before timing out."),
    ("peer", "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:58054"),
    ("peer", "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
    ("peer", "NCCL communicator was aborted on rank 1."),
    ("job", "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"),
    ("job", "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 2432 bytes"),
    ("peer", "NCCL error in: NCCLUtils.hpp:317, unhandled cuda error, NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 999 'unknown error'"),
    ("memory", "can't start new thread"),
    ("memory", "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes. Error code 12 (Cannot allocate memory)"),
    ("memory", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free. Process 4711 has 120.00 GiB memory in use. Including non-PyTorch memory, this process has 8.00 GiB memory in use."),
    ("job", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 138.00 GiB memory in use."),
    ("job", "CUDA error: device-side assert triggered"),
    ("job", "CUDA error: an illegal memory access was encountered"),
    ("job", "cuDNN error: CUDNN_STATUS_BAD_PARAM"),
    ("job", "NCCL error in: ProcessGroupNCCL.cpp:1, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.21.5"),
    ("job", "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, MMU Fault"),
    ("job", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), SAID)
def test_texts_of_the_libraries(kind: Kind, text: str) -> None:
    assert kind_of(RuntimeError(text)).kind == kind
    assert kind_of(ValueError(text)).kind == "job"  # no library raises it as such: the job's own words


def test_each_text_of_the_table_is_tried_above() -> None:
    """A row without an example would be a guess."""
    untried = [
        known.pattern
        for known in TEXTS
        if not any(re.search(known.pattern, text, re.IGNORECASE) for _, text in SAID)
    ]
    assert len(untried) <= 4, untried


def test_torchs_own_kinds_of_exception() -> None:
    out = torch.cuda.OutOfMemoryError(SAID[-7][1])
    assert kind_of(out).kind == "job"
    assert "lower batch.micro" in str(as_lockstep_error(out, "step 1"))
    assert kind_of(torch.distributed.DistNetworkError("The client socket has timed out")).kind == "peer"
    assert kind_of(torch.distributed.DistStoreError("wait timeout after 300000ms")).kind == "peer"


def test_a_gpu_without_room_for_nccl_is_told_as_one_without_room_for_the_job() -> None:
    """Its buffers lie beside torch's: another attempt would fail in the same way."""
    for kind, text in SAID:
        if kind == "job" and "ncclUnhandledCudaError" in text:
            error = as_lockstep_error(torch.distributed.DistBackendError(text), "step 1, rank 0")
            assert type(error) is JobError
            assert (error.code, error.remedy[:17]) == ("job.gpu_memory", "lower batch.micro")
            assert error.facts["where"] == "step 1, rank 0"


@pytest.mark.parametrize("number", sorted(ERRNOS))
def test_numbers_of_the_kernel(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert kind_of(error) == ERRNOS[number]
    assert kind_of(OSError(f"Caught OSError in DataLoader worker process 0.\n{error!r}\n{error}")) == ERRNOS[number]  # fmt: skip


def test_the_number_in_an_error_of_safetensors_counts() -> None:
    """Weights are written by it: its error has the kernel's number in its words alone."""
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert kind_of(full) == ERRNOS[errno.ENOSPC]
    error = StorageError("checkpoint.storage: cannot write 'final.safetensors'")
    error.__cause__ = full
    assert type(may_pass(error)) is TransientStorageError
    assert kind_of(SafetensorError("I/O error: Permission denied (os error 13)")).kind == "job"
    assert kind_of(SafetensorError("Error while deserializing header: header too small")).kind == "job"


def test_the_cause_counts_and_what_was_merely_handled_does_not() -> None:
    stale = OSError(errno.ESTALE, "Stale file handle")
    caused = JobError("x")
    caused.__cause__ = stale
    assert kind_of(caused).kind == "storage"
    handled = JobError("x")
    handled.__context__ = stale
    assert kind_of(handled).kind == "job"


def test_how_each_is_told() -> None:
    full = infrastructure_error(OSError(errno.ENOSPC, "No space left on device"), "step 3, rank 1")
    for text, problem in (
        ("CUDA error: unspecified launch failure", problems.DEVICE_FAILED),
        ("DefaultCPUAllocator: can't allocate memory", problems.NO_MEMORY),
        ("[gloo/transport] Connection closed by peer", problems.PEER_FAILED),
    ):
        failed = infrastructure_error(RuntimeError(text), "step 3, rank 1")
        assert failed is not None and (failed.code, failed.facts["got"]) == (problem.code, text)
    assert type(full) is TransientStorageError
    assert (
        str(full) == "a disk or quota is full (step 3, rank 1): OSError: [Errno 28] No space left on device"
    )
    ecc = as_lockstep_error(RuntimeError(SAID[0][1]), "step 7, rank 0")
    assert type(ecc) is DeviceError
    assert isinstance(ecc, ClusterError)
    assert type(as_lockstep_error(RuntimeError(SAID[14][1]), "rank 0")) is ClusterError
    assert infrastructure_error(ValueError("no"), "rank 0") is None
    assert type(as_lockstep_error(ValueError("no"), "rank 0")) is JobError


def test_a_known_error_with_a_cause_that_may_pass_is_tried_again() -> None:
    def raised(error: LockstepError, number: int) -> LockstepError:
        error.__cause__ = OSError(number, os.strerror(number))
        return error

    assert type(may_pass(raised(StorageError("checkpoint: x"), errno.ENOSPC))) is TransientStorageError
    known = may_pass(raised(problems.NO_FOLDER(folder="/tmp", got="No space left"), errno.ENOSPC))
    assert (type(known), known.code, known.facts["folder"]) == (
        TransientStorageError,
        "files.no_folder",
        "/tmp",
    )
    assert type(may_pass(raised(DataError("data: x"), errno.EIO))) is TransientStorageError
    assert type(may_pass(raised(StorageError("checkpoint: x"), errno.EACCES))) is StorageError
    assert type(may_pass(raised(SpecError("spec: x"), errno.EIO))) is SpecError
    assert type(may_pass(raised(JobError("job: x"), errno.EIO))) is TransientStorageError
    assert type(may_pass(raised(JobError("job: x"), errno.ENOENT))) is JobError
    assert type(may_pass(raised(JobImportError("job.use: x"), errno.ESTALE))) is TransientStorageError
    assert type(may_pass(raised(JobError("job: x"), errno.ENOMEM))) is ClusterError
    assert type(may_pass(raised(ResumeError("resume: x"), errno.EIO))) is ResumeError
    broken = JobError("data: sample 3 failed")
    broken.__cause__ = RuntimeError(SAID[0][1])
    assert type(may_pass(broken)) is DeviceError
    assert str(may_pass(broken)) == "data: sample 3 failed"


@pytest.mark.parametrize("kind", [DeviceError, TransientStorageError])
def test_they_survive_the_way_between_processes(kind: type[LockstepError]) -> None:
    assert str(pickle.loads(pickle.dumps(kind("one line")))) == "one line"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_an_error_that_is_its_own_cause_is_looked_at_once(length: int) -> None:
    """A library that raises a stored exception from a later one closes the circle; what it hides is found all the same."""

    def too_long(*_: object) -> None:
        raise AssertionError("the causes are followed for ever")

    links: list[BaseException] = [ValueError(f"link {i}") for i in range(length)]
    for link, cause in zip(links, [*links[1:], links[0]], strict=True):
        link.__cause__ = cause
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    try:
        assert kind_of(links[0]).kind == "job"
        links[-1].__cause__, lost = OSError(errno.ENOSPC, "full"), links[0]
        assert kind_of(lost).kind == "storage"
        assert as_lockstep_error(lost, "in step 1").exit_code
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
