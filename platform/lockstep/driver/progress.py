"""The live line in the driver's terminal: epoch, step, loss, rate, time left, share of the time spent waiting for data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lockstep.durations import duration_text
from lockstep.printing import on_one_line, printable
from lockstep.record.ledger.rows import StepRow

if TYPE_CHECKING:
    from rich.console import Console


class ProgressLine(NamedTuple):
    """How far a run is. A new figure is a field here, its value in `RunView.progress_line`, and its words in `text`."""

    step: int
    """The last step that is done."""
    attempt: int
    epoch: int
    """Counted from 0."""
    total_steps: int | None
    loss: float
    metrics: Mapping[str, float]
    """Of the newest evaluation."""
    samples_per_s: float
    """0 until there is a rate, as are the two below."""
    waiting: float
    """The share of the time that the newest step waited for data."""
    left_s: float

    @property
    def text(self) -> str:
        """The line as every screen shows it."""
        of = f"/{self.total_steps}" if self.total_steps else ""
        parts = [f"epoch {self.epoch + 1}", f"step {self.step}{of}", f"loss {self.loss:.4f}"]
        parts += [f"{name} {value:.4f}" for name, value in list(self.metrics.items())[:2]]
        if self.samples_per_s:
            parts += [f"{self.samples_per_s:,.0f} samples/s", f"waiting for data {self.waiting:.0%}"]
        if self.left_s:
            parts.append(f"{duration_text(self.left_s)} left")
        return " · ".join(parts)


class Progress(Protocol):
    """Shows how a run goes."""

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def show(self, line: ProgressLine) -> None:
        """Show how far the run is."""

    def table(self, headline: str, trials: Sequence[Mapping[str, Any]]) -> None:
        """Show how a sweep stands, and some of its trials: those that ended last and those that go on."""


class Silent:
    """No progress, for `--json`, tests and calls from Python."""

    def say(self, text: str) -> None: ...

    def show(self, line: ProgressLine) -> None: ...

    def table(self, headline: str, trials: Sequence[Mapping[str, Any]]) -> None: ...


@contextmanager
def display() -> Iterator[None]:
    """What the block writes to standard error is for people: if it cannot be written, nothing else fails.

    The reader is gone, or the disk of the log is full. From then on this process writes to the null device instead.
    """
    try:
        yield
    except OSError:
        _end_display()


def _end_display() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if os.path.sameopenfile(1, 2):  # while a command runs; see `lockstep.cli.command_output`
        os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def _console() -> Console:
    from rich.console import Console

    class Display(Console):
        """A console that ends nothing but itself. Rich exits where the reader is gone, and raises where a disk is full."""

        def __exit__(self, *error: Any) -> None:  # the one place where all that is shown is written
            with display():
                super().__exit__(*error)

        def on_broken_pipe(self) -> None:
            _end_display()

    return Display(stderr=True, highlight=False, markup=False, emoji=False)


class Line:
    """One line on standard error, rewritten in a terminal and printed now and then elsewhere."""

    def __init__(self) -> None:
        from rich.live import Live

        self.console = _console()
        self._live = Live(console=self.console, refresh_per_second=4, transient=False)
        self._epoch_shown = -1

    @contextmanager
    def running(self) -> Iterator[Line]:
        """The line, while something runs."""
        if not self.console.is_terminal:
            yield self
            return
        with self._live:
            yield self

    def say(self, text: str) -> None:
        self.console.print(printable(text), soft_wrap=True, markup=False)

    def show(self, line: ProgressLine) -> None:
        if self.console.is_terminal:
            self._live.update(on_one_line(line.text))
        elif line.epoch != self._epoch_shown:
            self._epoch_shown = line.epoch
            self.say(line.text)

    def table(self, headline: str, trials: Sequence[Mapping[str, Any]]) -> None:
        if self.console.is_terminal:
            self._live.update(trial_table(headline, trials))


def trial_table(headline: str, trials: Sequence[Mapping[str, Any]]) -> Any:
    """A sweep for a terminal."""
    from rich.table import Table

    table = Table(title=on_one_line(headline), title_justify="left", box=None, pad_edge=False)
    for name in ("trial", "status", "step", "metric", "sets"):
        table.add_column(name, justify="right" if name in {"trial", "step", "metric"} else "left")
    for trial in trials:
        metric = "" if trial["metric"] is None else f"{trial['metric']:.6g}"
        sets = " ".join(f"{name}={value}" for name, value in trial["fields"].items())
        cells = (str(trial["trial"]), trial["status"], str(trial["step"]), metric, sets)
        table.add_row(*map(on_one_line, cells))
    return table


FEW_STEPS = 5
"""Steps after an attempt's first one before a rate is told: the first ones are slower, and may be one poll apart."""


class Rate:
    """Samples and steps a second since the first row of this attempt; 0 until it has a few steps."""

    def __init__(self) -> None:
        self._first: StepRow | None = None
        self.steps_per_s = self.samples_per_s = self.waiting = 0.0

    def add(self, row: StepRow) -> None:
        """Take in a newer row."""
        if self._first is None or row.attempt != self._first.attempt:  # its clock stood still in between
            self._first = row
            self.steps_per_s = self.samples_per_s = 0.0
        seconds, steps = row.wall_clock - self._first.wall_clock, row.step - self._first.step
        if seconds > 0 and steps >= FEW_STEPS:
            self.steps_per_s = steps / seconds
            self.samples_per_s = (row.samples - self._first.samples) / seconds
        self.waiting = row.data_wait_s / row.step_s if row.step_s else 0.0
