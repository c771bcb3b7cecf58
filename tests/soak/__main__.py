"""Random programs under random faults, each held against the same run left alone, for as long as is wanted.

    python -m tests.soak --hours 2 --seed 1
    python -m tests.soak --replay failure.json

A case (`cases`) follows from its seed: a job, its spec, the attempts in which it is trained, whom it loses. The number of workers, the sharding and
the loader processes change from one attempt to the next; an attempt is stopped, or a worker of it is killed. A case that comes to other bits, or to an
error, is made smaller as long as it still fails, and written to a file that `--replay` takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from contextlib import closing
from pathlib import Path

from tests.distributed.pool import Pool
from tests.soak.cases import Case, draw, smaller
from tests.soak.trial import Outcome, attempt

TRIES = 2
"""A fault may come at another moment when it is tried again."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument(
        "--seed", type=int, default=1, help="the first case's; each further case has the next"
    )
    parser.add_argument("--replay", type=Path, help="a case that failed, instead of drawn ones")
    parser.add_argument("--failures", type=Path, default=Path("build/soak"), help="where cases that fail go")
    given = parser.parse_args()
    with closing(Pool(4)) as pool:
        if given.replay:
            outcome = attempt(pool, json.loads(given.replay.read_text()))
            print(outcome.line())
            raise SystemExit(bool(outcome.wrong))
        raise SystemExit(soak(pool, given.seed, given.hours, given.failures))


def soak(pool: Pool, seed: int, hours: float, failures: Path) -> int:
    """Try cases until the time is over; how many failed."""
    until, tried, faults, refused = time.monotonic() + hours * 3600, 0, 0, dict[str, int]()
    failed: list[int] = []
    while time.monotonic() < until:
        case, number = draw(seed + tried), seed + tried
        outcome = carefully(pool, case)
        tried += 1
        faults += outcome.faults
        for reason in outcome.refused:
            refused[reason] = refused.get(reason, 0) + 1
        if outcome.wrong:
            failed.append(number)
            print(f"case {number}: {outcome.line()}", flush=True)
            least = shrink(pool, case)
            failures.mkdir(parents=True, exist_ok=True)
            path = failures / f"case-{number}.json"
            path.write_text(json.dumps(least, indent=1))
            print(f"  made smaller: {path}", flush=True)
        elif tried % 20 == 0:
            print(f"{tried} cases, {faults} faults, {len(failed)} failed", flush=True)
    for reason, count in sorted(refused.items()):
        print(f"refused {count} times: {reason}")
    print(f"{tried} cases, {faults} faults; failed: {failed or 'none'}")
    return len(failed)


def shrink(pool: Pool, case: Case) -> Case:
    """The least case that still fails, as far as single cuts lead."""
    while True:
        for less in smaller(case):
            if any(carefully(pool, less).wrong for _ in range(TRIES)):
                case = less
                break
        else:
            return case


def carefully(pool: Pool, case: Case) -> Outcome:
    """The outcome of a case, also where the harness itself fails."""
    try:
        return attempt(pool, case)
    except Exception:  # noqa: BLE001 - told as the case's outcome
        return Outcome(traceback.format_exc(), 0, ())


if __name__ == "__main__":
    sys.exit(main())
