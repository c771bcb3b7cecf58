"""Where an attempt begins: with as many workers as there is room for. If that is fewer than `workers.min`, it waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep.attempts import problems
from lockstep.attempts.cluster_capacity import can_grow, find_place, most_resources
from lockstep.attempts.demand import RoomRequest
from lockstep.attempts.placement import WorkerPlacement, each_of, total
from lockstep.driver.signals import StopSignal
from lockstep.errors import SpecError
from lockstep.spec.fields import Spec

Say = Callable[[str], None]


def first_place(spec: Spec, stop: StopSignal, say: Say) -> WorkerPlacement:
    """The placement that a run begins with. SpecError for fewer than `workers.min`, unless the cluster can grow to them."""
    try:
        return find_place(spec)
    except SpecError:
        if not can_grow(spec):
            raise
        return next_place(spec, frozenset(), stop, say)


def next_place(spec: Spec, left_out: frozenset[str], stop: StopSignal, say: Say) -> WorkerPlacement:
    """As many workers as there is room for now, on none of the nodes that are left out.

    If there is no room for `workers.min`, room is requested and waited for as long as the spec allows; then ClusterError.
    """
    request = RoomRequest()
    try:
        return _when_there_is_room(spec, left_out, request, stop, say)
    finally:
        request.release()


def _when_there_is_room(
    spec: Spec, left_out: frozenset[str], request: RoomRequest, stop: StopSignal, say: Say
) -> WorkerPlacement:
    began, announced = time.monotonic(), False
    until = began + spec.faults.wait_for_workers_s
    each = each_of(spec, total(most_resources()))
    while True:
        try:
            return find_place(spec, left_out)
        except SpecError as error:
            request.want(1, each, together=spec.workers.min)
            if stop.asked:
                waited_s = time.monotonic() - began
                ended = problems.WAIT_SIGNALLED(
                    got=error.evidence, seconds=f"{waited_s:.0f}", remedy=error.remedy
                )
                raise stop.ended(ended) from error
            if time.monotonic() >= until:
                raise problems.WAITED(
                    got=error.evidence, seconds=f"{spec.faults.wait_for_workers_s:g}", remedy=error.remedy
                ) from error
            if not announced:
                resources = ", ".join(f"{amount:g} {kind}" for kind, amount in each.items())
                say(
                    f"waiting for workers: {error}; the cluster is asked for {spec.workers.min} of {resources} each"
                )
                announced = True
            stop.wait(1.0)
