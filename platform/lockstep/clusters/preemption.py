"""The agent of a node: when the machine is about to go, it has its Ray nodes drained, which runs answer with a save and a move.

It polls the cloud's metadata service, if it is given the address (AWS: IMDSv2; GCP), and handles SIGTERM, by which a pod or a
service ends. Without an address, or if nothing answers there, it only waits for SIGTERM. It imports neither Ray nor torch:
a command of its own does the draining, and is started when there is a notice.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import Literal, NoReturn

from lockstep.clusters import problems

EVERY_S = 5.0
"""Seconds between two requests to AWS, as AWS advises; its notice comes two minutes before the end."""

CHANGE_S = 60
"""How long GCP may hold a request until the answer changes."""

ANSWER_S = 3.0
"""How long the service may take to answer beyond that; it is on the machine's own host."""

TRIES = 3
"""How often it is tried at the start before it counts as absent."""

PREEMPTED_S = 30.0
"""How long GCP leaves a spot machine after it is preempted."""

MAINTENANCE_S = 60.0
"""The least time that GCP leaves before a machine is stopped for maintenance."""

TOKEN_S = 21600
"""How long a token of IMDSv2 is valid."""

DRAIN_S = 90.0
"""How long the draining command may take, its imports included."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The machine is about to go: why, and its deadline in Unix seconds (None if unknown)."""

    why: str
    deadline: float | None


class NoServiceError(Exception):
    """No metadata service answers at the address."""


def _none_at(url: str, error: Exception) -> NoServiceError:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
    return NoServiceError(f"{url}: {error}")


# Machines ask their own host: a proxy would answer for another one.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Aws:
    """The instance metadata service of EC2, version 2. Each request carries a token, which is renewed when it has expired."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._token = ""

    def begin(self) -> None:
        """NoServiceError where it does not answer."""
        try:
            self._renew()
        except (OSError, ValueError) as error:
            raise _none_at(self._url, error) from error

    def notices(self) -> Iterator[Notice | None]:
        """Yields what each request finds, EVERY_S apart; None for no news."""
        reported: set[str] = set()
        while True:
            for path, read in (
                ("spot/instance-action", _instance_action),
                ("events/recommendations/rebalance", _rebalance),
            ):
                text = self._get(f"/latest/meta-data/{path}")
                notice = read(text) if text is not None and text not in reported else None
                if text is not None:
                    reported.add(text)
                yield notice
            time.sleep(EVERY_S)

    def _renew(self) -> None:
        request = urllib.request.Request(
            f"{self._url}/latest/api/token",
            method="PUT",
            headers={"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)},
        )
        with _open(request, timeout=ANSWER_S) as answer:
            self._token = answer.read().decode()

    def _get(self, path: str) -> str | None:
        """The text at `path`; None for 404, by which the service says that there is no notice."""
        for attempt in range(2):
            request = urllib.request.Request(
                self._url + path, headers={"X-aws-ec2-metadata-token": self._token}
            )
            try:
                with _open(request, timeout=ANSWER_S) as answer:
                    text: str = answer.read().decode()
                    return text
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 404:
                    return None
                if error.code != 401 or attempt:
                    raise
                self._renew()
        return None


def _instance_action(text: str) -> Notice:
    document = json.loads(text)
    return Notice(f"AWS will {document['action']} this spot instance", _unix(document["time"]))


def _rebalance(text: str) -> Notice:
    return Notice("AWS recommends to leave this spot instance", None)


def _unix(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


class Gcp:
    """One of the two values of Compute Engine's metadata service that announce an end; a request waits for the value to change."""

    def __init__(self, url: str, value: Literal["preempted", "maintenance-event"]) -> None:
        self._url = f"{url.rstrip('/')}/computeMetadata/v1/instance/{value}"
        self._read = _preempted if value == "preempted" else _maintenance
        self._tag = "0"

    def begin(self) -> None:
        """NoServiceError where it does not answer."""
        try:
            self._ask("")
        except (OSError, ValueError) as error:
            raise _none_at(self._url, error) from error

    def notices(self) -> Iterator[Notice | None]:
        """Yields what each answer says: the first at once, the others when the value changes or after CHANGE_S; None for no news."""
        previous: Notice | None = None
        # No answer has the tag 0, so the current value is returned at once.
        self._tag = "0"
        while True:
            notice = self._read(
                self._ask(f"?wait_for_change=true&timeout_sec={CHANGE_S}&last_etag={self._tag}")
            )
            yield notice if notice is not None and previous is None else None
            previous = notice

    def _ask(self, query: str) -> str:
        request = urllib.request.Request(self._url + query, headers={"Metadata-Flavor": "Google"})
        with _open(request, timeout=ANSWER_S + (CHANGE_S if query else 0)) as answer:
            if answer.headers.get("Metadata-Flavor") != "Google":
                raise ValueError("the answer is not the metadata service's")
            self._tag = answer.headers.get("ETag", "0")
            text: str = answer.read().decode().strip()
            return text


def _preempted(text: str) -> Notice | None:
    return Notice("GCP preempts this machine", time.time() + PREEMPTED_S) if text == "TRUE" else None


def _maintenance(text: str) -> Notice | None:
    """The notice of a maintenance that stops the machine; one that only moves it (MIGRATE_ON_HOST_MAINTENANCE) gives none."""
    if text != "TERMINATE_ON_HOST_MAINTENANCE":
        return None
    return Notice("GCP stops this machine for maintenance", time.time() + MAINTENANCE_S)


Source = Aws | Gcp


def sources(cloud: str, url: str) -> list[Source]:
    """What to ask of a cloud's metadata service at `url`. SpecError for a cloud other than aws and gcp."""
    if not url.startswith("http://"):
        raise problems.METADATA(got=url)
    if cloud == "aws":
        return [Aws(url)]
    if cloud == "gcp":
        return [Gcp(url, "preempted"), Gcp(url, "maintenance-event")]
    raise problems.CLOUD(got=cloud)


class Agent:
    """Passes each notice of the `sources` to `leave`, from the main thread, until SIGTERM, which leaves `grace_s` and is the last notice.

    `leave(notice, wait)` drains the machine's nodes; with `wait` it returns when nothing runs on them any more.
    """

    def __init__(
        self,
        sources: list[Source],
        leave: Callable[[Notice, bool], None],
        grace_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._sources, self._leave, self._grace_s, self._say = sources, leave, grace_s, say
        self._heard: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Run until SIGTERM, then until the machine's nodes are empty. Call it in the main thread."""
        signal.signal(signal.SIGTERM, self._end)
        for source in self._sources:
            if self._answers(source):
                threading.Thread(
                    target=self._ask, args=(source,), name="lockstep-notices", daemon=True
                ).start()
        while (notice := self._heard.get()) is not None:
            self._say(notice.why)
            self._leave(notice, False)
        self._leave(Notice("this node is told to end", time.time() + self._grace_s), True)

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._heard.put(None)

    def _answers(self, source: Source) -> bool:
        for _ in range(TRIES):
            try:
                source.begin()
            except NoServiceError as error:
                problem = error
            else:
                return True
        self._say(f"no metadata service answers, so none is polled ({problem})")
        return False

    def _ask(self, source: Source) -> NoReturn:
        while True:
            try:
                for notice in source.notices():
                    if notice is not None:
                        self._heard.put(notice)
            except (OSError, ValueError, KeyError) as error:
                self._say(f"the metadata service: {error}; the next try is in {EVERY_S:.0f} s")
                time.sleep(EVERY_S)


def leave_by_command(notice: Notice, wait: bool, *, address: str | None, node: str | None) -> None:
    """Drain this machine's nodes by `lockstep cluster leave` in a process of its own, which is tried several times."""
    words = [sys.executable, "-P", "-m", "lockstep", "cluster", "leave", "--why", notice.why]
    words += [] if address is None else ["--address", address]
    words += [] if node is None else ["--node", node]
    words += ["--wait"] if wait else []
    for _ in range(TRIES):
        left_s = None if notice.deadline is None else max(0.0, notice.deadline - time.time())
        seconds_option = [] if left_s is None else ["--seconds", f"{left_s:.0f}"]
        limit_s = DRAIN_S + (left_s or 0.0 if wait else 0.0)
        try:
            if subprocess.run([*words, *seconds_option], timeout=limit_s, check=False).returncode == 0:
                return
        except subprocess.TimeoutExpired:
            continue
