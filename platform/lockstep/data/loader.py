"""Fetches whole micro-batches, in this process or in loader processes, with the same bits either way.

A micro-batch is fetched and collated in one call by one process, after that process seeded its generators from
(seed, "data", step, m): neither the number of loader processes nor where a run was resumed can change a draw.
What samples are may not depend on what training changes, which a loader process sees as it was when it was forked: now
and then the worker fetches a micro-batch itself as well, and compares.
Without loader processes the training thread fetches: a background thread would draw from the same generators. Only
what a dataset that draws nothing fetches comes from a thread, ahead of time; its collation stays where it was. Rows that
are in memory already and are computed on the processor need none: it would take a core from those that compute.
The fetch has one intra-op thread, as a forked process must, so that sums in a dataset are the same bits as well.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Semaphore
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from lockstep.data import fork_isolation, problems
from lockstep.data.conversion import converted
from lockstep.data.fingerprint import difference
from lockstep.data.micro_batches import MicroBatches
from lockstep.data.sampler import MicroBatch
from lockstep.errors import ClusterError, LockstepError
from lockstep.job.inputs.variables import open_channel, report_reads
from lockstep.process import end_with_parent
from lockstep.threads import one_thread_here

ALIGNMENT = 64
"""Bytes at which torch allocates; some kernels give other bits for inputs that lie elsewhere."""

AHEAD = 4
"""Micro-batches that a thread fetches ahead of the one that is computed."""

START_S = 20.0
"""How long loader processes may take to begin; they need milliseconds, on a crowded machine a second."""

STARTS = 5
"""How often they are started before the run gives up."""


class Loader:
    """Gives micro-batches on the worker's device, in order, and measures the time spent waiting for them."""

    def __init__(
        self,
        dataset: MicroBatches,
        batches: Iterable[MicroBatch],
        device: torch.device,
        processes: int = 0,
        forked: Callable[[], None] = lambda: None,
        compared: Callable[[MicroBatch], bool] | None = None,
        check: Callable[[MicroBatch], None] | None = None,
    ) -> None:
        """`forked` is called first in each loader process. `compared` names micro-batches that, where they are fetched ahead of their
        time or in another process, are fetched here as well when their time has come, and must be the same; `check` is called for each then.
        """
        self.device = device
        self.waited_s = 0.0
        self._dataset, self._processes = dataset, processes
        ahead = processes or (device.type == "cuda" and not dataset.draws_nothing)
        self._compared: Callable[[MicroBatch], bool] = (ahead and compared) or (lambda _: False)
        self._check: Callable[[MicroBatch], None] = check or (lambda _: None)
        self._noted: Noted | None = None
        if check is not None or (compared is not None and ahead):
            self._noted = batches = Noted(batches)
        self._fetched: Iterator[Any]
        if processes:
            self._fetched = _data_loader(dataset, batches, device, processes, forked)
        elif dataset.draws_nothing and not (dataset.in_memory and device.type == "cpu"):
            self._fetched = _fetched_ahead(dataset, batches)
        else:
            # What DataLoader does without processes, less its bookkeeping, which costs 13 us a micro-batch.
            self._fetched = (converted(dataset[batch]) for batch in batches)
        self._batches = self._fetched if device.type == "cpu" else _copied_ahead(self._fetched, device)

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except (
            ConnectionError,
            EOFError,
            FileNotFoundError,
        ) as error:  # met before torch has looked at its processes
            raise _lost(error) from error
        except RuntimeError as error:
            lost = process_lost(error)
            if lost is None:
                raise
            raise lost from error
        if isinstance(batch, LockstepError):
            raise batch
        if self.device.type == "cpu":
            batch = map_tensors(batch, aligned)
        self.waited_s += time.perf_counter() - began
        if self._noted is not None:
            key = self._noted.upcoming.popleft()
            self._check(key)
            if self._compared(key):
                self._compare(key, batch)
        return batch

    def _compare(self, key: MicroBatch, batch: Any) -> None:
        """Refuse a micro-batch that is another one when it is fetched now. Raises SpecError or DeterminismError, which no other attempt can mend."""
        refetched = converted(self._dataset[key._replace(due=())])
        if isinstance(refetched, LockstepError):
            raise refetched
        if self._processes:
            refetched = _handed_over(refetched)
        if self.device.type == "cuda":
            refetched = next(_copied_ahead(iter([refetched]), self.device))
        location = difference(batch, refetched)
        if location is None:
            return
        where = f"step {key.step_number}, micro-batch {key.micro_batch}, differs{location} from what the worker fetches itself"
        advice = (
            "samples or their collation depend on what training changes, such as an attribute that job.after_step sets, or on the process: let "
            "them depend on the seed, the epoch and the sample alone, and do in job.loss what changes with the step"
        )
        if self._processes:
            raise problems.PROCESSES_DIFFER(got=self._processes, where=where, advice=advice)
        raise problems.FETCHED_AHEAD(where=where, advice=advice)

    def __iter__(self) -> Iterator[Any]:
        return self

    def close(self) -> None:
        """End the loader's processes or its thread; nothing is left running when this returns."""
        if isinstance(self._fetched, Generator):
            self._fetched.close()
        else:
            self._fetched._shutdown_workers()  # type: ignore[attr-defined]


class Noted:
    """Micro-batches as they are asked for; `upcoming` has those that were asked for and not given yet."""

    def __init__(self, batches: Iterable[MicroBatch]) -> None:
        self._batches = batches
        self.upcoming: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[MicroBatch]:
        self.upcoming.clear()  # loader processes that never began are asked again
        for batch in self._batches:
            self.upcoming.append(batch)
            yield batch


def _handed_over(value: Any) -> Any:
    """A micro-batch as another process would receive it: an object may leave behind what pickle does not take along."""
    try:
        return pickle.loads(pickle.dumps(value))
    except (pickle.PicklingError, TypeError, AttributeError):  # torch hands over more than pickle alone does
        return value


def _fetched_ahead(dataset: MicroBatches, batches: Iterable[MicroBatch]) -> Iterator[Any]:
    """Micro-batches whose samples a thread has fetched while those before were computed; they are collated here."""
    waiting: deque[tuple[MicroBatch, Future[Any]]] = deque()
    with ThreadPoolExecutor(1, "lockstep-data") as thread:
        thread.submit(one_thread_here).result()  # before this thread may change torch's number for a while
        try:
            for batch in batches:
                waiting.append((batch, thread.submit(dataset.fetched, batch)))
                if len(waiting) > AHEAD:
                    yield converted(dataset.collated(*waiting.popleft()))
            while waiting:
                yield converted(dataset.collated(*waiting.popleft()))
        finally:
            thread.shutdown(cancel_futures=True)


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Micro-batches on a CUDA device; each is copied, on a stream of its own, while the one before it is computed."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copied(batch: Any) -> tuple[Any, torch.cuda.Event | None]:
        if isinstance(batch, LockstepError):
            return batch, None
        with torch.cuda.stream(stream):  # pinned memory is kept until its copy is done
            on_device = map_tensors(batch, lambda tensor: _copied_dense(tensor, device), lambda value: value)
        return on_device, stream.record_event()

    def ready(on_device: Any, event: torch.cuda.Event | None) -> Any:
        if event is None:
            return on_device
        current = torch.cuda.current_stream(device)
        current.wait_event(event)
        # Sparse tensors and objects are copied here, by the stream that computes: what another one copies could be freed too early.
        return map_tensors(
            on_device, lambda tensor: _used_on(tensor, device, current), lambda value: moved(value, device)
        )

    previous = None
    for batch in batches:
        latest = copied(batch)
        if previous is not None:
            yield ready(*previous)
        previous = latest
    if previous is not None:
        yield ready(*previous)


def _copied_dense(tensor: Tensor, device: torch.device) -> Tensor:
    """A dense tensor of the processor on the device, by a copy that nothing waits for; any other tensor as it is."""
    if tensor.device.type != "cpu" or not is_dense(tensor):
        return tensor
    return own_elements(tensor).pin_memory().to(device, non_blocking=True)


def own_elements(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of one that was expanded: pinned memory has room for each element."""
    if is_dense(tensor) and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return tensor.contiguous()
    return tensor


class _Pinnable:
    """A micro-batch that the thread of torch's loader pins by this method, and gives without it. Torch's own way adds up a `Counter`, as its conversion does."""

    def __init__(self, batch: Any) -> None:
        self.batch = map_tensors(converted(batch), own_elements)

    def pin_memory(self) -> Any:
        return map_tensors(self.batch, lambda tensor: tensor.pin_memory(), _pinned)


def _pinned(value: Any) -> Any:
    pin = getattr(value, "pin_memory", None)
    return pin() if callable(pin) and not isinstance(value, type) else value


def _used_on(tensor: Tensor, device: torch.device, stream: torch.cuda.Stream) -> Tensor:
    """A tensor on the device, whose memory is kept from the stream that it was made on until this one is done with it."""
    if tensor.device.type == "cpu":
        return tensor.to(device)
    if is_dense(tensor):
        tensor.record_stream(stream)
    return tensor


def _data_loader(
    dataset: MicroBatches,
    batches: Iterable[MicroBatch],
    device: torch.device,
    processes: int,
    forked: Callable[[], None],
) -> Iterator[Any]:
    """Torch's own loader, whose processes have all begun. It goes over `batches` again where it has to start anew.

    Python before 3.11.8 forks a process that never begins if a C++ thread, such as gloo's, enters the interpreter
    at that moment (python/cpython#112275): seen once in some ten thousand. The run would wait for it for ever.
    """
    pinned = device.type == "cuda"
    open_channel()
    for _ in range(STARTS):
        begun = multiprocessing.get_context("fork").Semaphore(0)
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=batches,
            collate_fn=_Pinnable if pinned else converted,
            num_workers=processes,
            # A fork shares the dataset's memory and needs no pickling.
            multiprocessing_context="fork" if processes else None,
            worker_init_fn=partial(_begin, os.getpid(), begun, forked, fork_isolation.opened()),
            pin_memory=pinned,
            generator=torch.Generator().manual_seed(0),  # else starting it would draw from the default one
        )
        with nothing_collected_in_children():
            iterator: Any = iter(loader)
        _unwatched(iterator)
        if all(begun.acquire(timeout=START_S) for _ in range(processes)):
            return iterator  # type: ignore[no-any-return]
        _end(iterator)
    raise problems.PROCESSES_SLOW(limit_s=f"{START_S:g}", tries=STARTS)


@contextmanager
def nothing_collected_in_children() -> Iterator[None]:
    """Keep the garbage collector of a process that is forked meanwhile away from what it inherits.

    Among that may be a process group that is garbage already: its destructor, in a process without its threads, waits
    for them for ever.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _begin(
    parent: int,
    begun: Semaphore,
    forked: Callable[[], None],
    opened: Sequence[fork_isolation.Opened],
    _number: int,
) -> None:
    """The first thing that a loader process does. `opened` is what its parent had open before it made any for it.

    A dataset sees no worker info: what it gave by the number of its process would be another sample without processes.
    """
    end_with_parent(parent)  # torch's own look at the parent comes only between two samples
    torch.utils.data._utils.worker._worker_info = None
    forked()
    report_reads()
    fork_isolation.separate_from_parent(opened)
    fork_isolation.look_for_waits(MicroBatches.__getitem__.__code__)
    begun.release()


def _unwatched(iterator: Any) -> None:
    """Take loader processes off the list that torch's SIGCHLD handler looks at.

    The handler raises in the main thread wherever that is: in the midst of a checkpoint, or in `close`, where it would
    take the place of the error that is under way. The queue's own look finds a lost process within 5 s, in any thread.
    """
    if iterator._worker_pids_set:
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def _end(iterator: Any) -> None:
    """End loader processes, even those that hear no signal."""
    processes = list(iterator._workers)
    iterator._shutdown_workers()
    for process in processes:
        process.kill()
        process.join()


def process_lost(error: BaseException) -> ClusterError | None:
    """What torch's complaint about a loader process that is gone means, or None for any other error."""
    return _lost(error) if str(error).startswith("DataLoader worker (pid") else None


def _lost(error: BaseException) -> ClusterError:
    text = " ".join(str(error).split()) or type(error).__name__
    return problems.PROCESS_LOST(got=text)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself where its memory is aligned, else a copy that is."""
    if tensor.device.type == "cpu" and (not is_dense(tensor) or tensor.data_ptr() % ALIGNMENT):
        return cloned(tensor)
    return tensor


def cloned(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, with the same strides also where these leave gaps: `clone` would close them, and a kernel then adds in another order."""
    if not is_dense(tensor) or tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    reached = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reached,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is one block of memory, which has an address and can be pinned. Sparse and nested ones are made of several."""
    return tensor.layout == torch.strided and not tensor.is_nested


def moved(value: Any, device: torch.device) -> Any:
    """An object on the device where it has a method `to`, as a graph library's batch or a packed sequence; else as it is."""
    to = getattr(value, "to", None)
    return to(device) if callable(to) and not isinstance(value, type) else value


def map_tensors(
    value: Any, change: Callable[[Tensor], Tensor], otherwise: Callable[[Any], Any] | None = None
) -> Any:
    """`value` with every tensor in its tuples, lists and mappings changed; `otherwise`, if given, changes what is none of these."""
    if isinstance(value, Tensor):
        return change(value)
    if otherwise is not None and isinstance(value, PackedSequence):
        return otherwise(value)  # one of its tensors stays on the processor
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)  # a defaultdict or a UserDict is not made from a plain dict alone
        for key, inner in value.items():  # one by one: `update` of a Counter adds
            changed[key] = map_tensors(inner, change, otherwise)
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(inner, change, otherwise) for inner in value))
    if isinstance(value, list):
        # A class of the job's own may be made from more than its elements, and hold more.
        row = copy.copy(value)
        row[:] = [map_tensors(inner, change, otherwise) for inner in value]
        return row
    if isinstance(value, tuple):
        return type(value)(map_tensors(inner, change, otherwise) for inner in value)
    return value if otherwise is None else otherwise(value)
