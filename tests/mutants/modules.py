"""Which test files cover a module, the quick ones first, and which mutants are none: the module does the same with them."""

from __future__ import annotations

COVERED = {
    "attempts/supervisor.py": ["tests/unit/attempts/test_supervisor.py"],
    "attempts/attempt_watch.py": ["tests/unit/attempts/test_supervisor.py"],
    "attempts/run_account.py": ["tests/unit/attempts/test_supervisor.py"],
    "record/ledger/journal_file.py": [
        "tests/unit/record/ledger/test_journal_file.py",
        "tests/unit/record/ledger/test_journal.py",
        "tests/unit/record/test_full_disk.py",
        "tests/unit/record/test_power_loss.py",
    ],
    "record/ledger/journal.py": [
        "tests/unit/record/ledger/test_journal_file.py",
        "tests/unit/record/ledger/test_journal.py",
        "tests/unit/record/test_full_disk.py",
        "tests/unit/record/ledger/test_time_spent.py",
        "tests/unit/record/test_going_on.py",
    ],
    "record/mirror/metric_cursor.py": [
        "tests/unit/record/mirror/test_metric_cursor.py",
        "tests/unit/record/test_outage.py",
        "tests/unit/record/test_partial_store.py",
    ],
    "training/elastic/recovery.py": [
        "tests/unit/training/elastic/test_recovery.py",
        "tests/distributed/test_joining.py",
        "tests/distributed/test_survivors.py",
    ],
    "training/setup.py": [
        "tests/unit/training/test_setup.py",
        "tests/distributed/test_stop.py",
        "tests/distributed/test_initial_weights.py",
        "tests/distributed/test_joining.py",
        "tests/distributed/test_recheck.py",
        "tests/distributed/test_without.py",
        "tests/distributed/test_full_sharding.py::test_a_parameter_that_the_job_holds_itself_is_refused",
        "tests/distributed/test_full_sharding.py::test_a_parameter_that_only_garbage_holds_is_let_go",
        "tests/distributed/test_mistakes.py",
    ],
    "training/loop.py": [
        "tests/unit/training/test_loop.py",
        "tests/distributed/test_stop.py",
        "tests/distributed/test_last_comparison.py",
        "tests/distributed/test_evaluation.py",
        "tests/distributed/test_joining.py",
        "tests/distributed/test_inputs.py",
        "tests/distributed/test_survivors.py",
        "tests/distributed/test_resume.py",
    ],
}
"""By module below `platform/lockstep`."""

_PACE = "the same is seen, up to a second earlier or later"
_FALSE = "what is returned is only asked whether it is true"

EQUIVALENT: dict[str, dict[str, str]] = {
    "attempts/attempt_watch.py": {
        "AttemptWatch._pace_s: and/or swapped: self._stop.asked or self.moving or self._change or untold -> (self._stop.asked and self.moving and self._change and untold)": _PACE,
        "AttemptWatch._pace_s: condition negated: not self._account.is_named -> (not (not self._account.is_named))": _PACE,
    },
    "record/ledger/journal_file.py": {
        "JournalFile._lines: comparison swapped: start < until -> (start <= until)": "no bytes are read then, which ends the loop",
        "JournalFile.append: statement deleted: self.torn = False -> pass": "the next line first cuts off what follows the last whole one: nothing",
        "JournalFile.__init__: constant changed: False -> True": "as above, before the first line",
        "JournalFile.is_deleted: None returned: return False -> return None": _FALSE,
    },
    "record/ledger/journal.py": {
        "newest_step: statement deleted: file.seek(max(0, size - length)) -> pass": "all of the file is read, and not its end alone: slower",
        "Journal._first_step: constant changed: 0 -> (-1)": "it is asked for only where there are steps",
    },
}
"""By module, the name of each such mutant and why no test can notice it."""
