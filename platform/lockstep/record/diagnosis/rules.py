"""What a run's rows show to be wrong with it, each problem reported once, with its evidence and a remedy. A pure fold over rows.

Steps are judged in windows of `WINDOW`, evaluations and observations one by one. A rule reports only when its evidence has lasted, and
looks only at the newest `REACH` steps. So a resumed run is judged from those rows, and `reported` has the rules that have reported already.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, assert_never

from lockstep.record.events import union
from lockstep.record.events.union import Diagnosed, Recorded
from lockstep.record.ledger.rows import EvaluationRow, Observation, StepRow

WINDOW = 50
"""Steps that are judged together."""

REACH = 20_000
"""How many of the newest steps a rule looks at."""

FLAT = 0.02
"""A loss that has changed by less than this share, and by less than its own noise, has not moved."""

FLAT_WINDOWS = 6
"""How many windows a loss must be flat."""

RISEN = 1.2
"""A loss has risen if it is so many times the loss of the first steps."""

SPIKE, SPIKE_SPREADS, SPIKE_LOST, RECOVERED = 2.0, 12.0, 0.25, 10
"""A spike is at least so many times the median of the window before it, so many of its spreads above that, and so much of what the loss had
fallen; it must be gone after so many steps."""

IDLE, IDLE_S = 0.5, 0.002
"""The share of a step's time, and the seconds, for which a device may wait for data."""

SKIPPED = 0.2
"""The share of a window's steps that fp16 may skip, once its scale has been found."""

LOW_RATIO = 1e-5
"""If every layer's update is smaller than this relative to the weights, it is too small to have an effect."""

HIGH_RATIO, HIGH_TIMES = 0.1, 3
"""If a layer's update is larger than this relative to its weights, in so many observations in a row, it makes another model each time."""

SILENT, SILENT_TIMES = 0.5, 3
"""The share of a layer group's units that may have no gradient, and for how many observations in a row."""

DEAD = "dead units"
"""The rule that reports dead units: a loss that does not move then needs no other explanation."""

UNDERFLOW = 0.5
"""The share of gradient elements that fp16 may be unable to hold at full precision."""

APART, APART_TIMES = 0.5, 2
"""How much a micro-batch's gradient may differ from that in fp32, relative to its norm, and for how many comparisons in a row."""

WORSE, WORSE_TIMES = 1.1, 3
"""A model overfits if the evaluation's loss rises in so many evaluations in a row, to so many times its best."""

LOST = 0.05
"""A rise by less than this share of what the loss had fallen is no loss of progress: near zero only noise is left."""

OTHER = 1.5
"""If an evaluation's loss is so many times the training loss before any sample was seen twice, evaluation computes something else."""

DIFFERS = "evaluation differs"
"""The rule that reports this: such an evaluation says nothing about overfitting."""

ENDED, ENDED_SHARE = 1e-3, 0.25
"""A schedule has ended if the rate was below this share of its highest for this share of the steps."""

GROWTH, GROWTH_MB, GROWTH_TIMES = 1.25, 256.0, 10
"""Memory grows if it never fell in so many observations in a row, and is so many times, and so many MB, larger."""


GRAPH_KEPT = "graph kept alive"
"""The rule by which a worker names what keeps adding graphs. Growing memory then needs no other explanation."""


class Window(NamedTuple):
    """Consecutive steps, summarised."""

    first: int
    last: int
    loss: float
    noise: float
    """Standard deviation of the losses within the window."""
    rate: float
    """The highest learning rate."""
    waited: float
    """Share of the time spent waiting for data."""
    waited_s: float
    """Seconds per step spent waiting for data."""
    skipped: float
    """Share of the steps that were skipped."""


@dataclass(slots=True)
class Diagnosis:
    """The fold over one run. `take` gives what a row shows for the first time.

    `reported` has the rules that have reported already. `trained` means that the run starts from weights that may be good already, so no progress is expected.
    """

    reported: set[str] = field(default_factory=set)
    trained: bool = False
    _open: list[StepRow] = field(default_factory=list)
    _windows: deque[Window] = field(default_factory=lambda: deque(maxlen=REACH // WINDOW))
    _start: float | None = None
    """Mean loss of the run's first steps, if they were seen."""
    _initial: float = math.inf
    """The loss of the first step, before any update."""
    _spike: tuple[StepRow, float, float] | None = None
    """A step far above the window before it, with the window's median and bound."""
    _median: tuple[float, float] | None = None
    """For the newest window: the median of its losses, and the bound above which a loss is a spike."""
    _evaluations: list[tuple[EvaluationRow, float]] = field(default_factory=list)
    """The evaluations, each with the training loss at that time."""
    _apart: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """The newest comparisons of a gradient with that in fp32, by name: the step, and the difference."""
    _observed: deque[Observation] = field(default_factory=lambda: deque(maxlen=GROWTH_TIMES))

    def take(self, event: Recorded) -> Iterator[Diagnosed]:
        """Judge a row. Other events show nothing here."""
        match event:
            case StepRow():
                findings = self._step(event)
            case EvaluationRow():
                findings = self._evaluation(event)
            case Observation():
                findings = self._observation(event)
            case Diagnosed():
                self.reported.add(event.rule)
                return
            case union.Started() | union.CheckpointRow() | union.Sampled():
                return
            case union.PeakMemory() | union.AttemptsSummarised() | union.Document():
                return
            case union.Finished() | union.Failed() | union.TakenOver():
                return
            case (
                union.Corrupted()
                | union.ResumeChecked()
                | union.Warned()
                | union.Straggling()
                | union.TimeSpent()
            ):
                return
            case (
                union.Violated()
                | union.Alerted()
                | union.InputsFound()
                | union.Opened()
                | union.SetAside()
                | union.Mended()
                | union.Delivered()
            ):
                return
            case _:
                assert_never(event)
        for finding in findings:
            if finding.rule not in self.reported:
                self.reported.add(finding.rule)
                yield finding

    # --- steps --------------------------------------------------------------------------------------------

    def _step(self, row: StepRow) -> Iterator[Diagnosed]:
        yield from self._spikes(row)
        self._open.append(row)
        if row.step % WINDOW:
            return
        rows, self._open = self._open, []
        losses = [step_row.loss for step_row in rows if math.isfinite(step_row.loss)]
        if rows[0].step == 1 and losses:
            self._start, self._initial = statistics.fmean(losses[:10]), losses[0]
        if len(rows) < WINDOW or len(losses) < WINDOW // 2:
            return
        self._windows.append(_window(rows, losses))
        self._median = _bound(losses)
        yield from self._idle()
        yield from self._skips()
        yield from self._moves()
        yield from self._plateau()

    def _spikes(self, row: StepRow) -> Iterator[Diagnosed]:
        if self._spike is not None:
            top, median, bound = self._spike
            if row.loss <= (median + bound) / 2:
                self._spike = None
                yield Diagnosed(
                    "loss spike",
                    top.step,
                    f"the loss of step {top.step} is {top.loss:.4g}, of the steps before it {median:.4g} (gradient norm {top.grad_norm:.4g}); "
                    f"it was back at step {row.step}",
                    "look at the samples of that step, and set clip_norm or lower optimizer.lr",
                )
            elif row.step > top.step + RECOVERED:
                self._spike = None  # no spike: the loss has risen
        elif self._median is not None and row.loss > self._median[1]:
            median = self._median[0]
            if self._start is None or row.loss - median > SPIKE_LOST * abs(self._start - median):
                self._spike = (row, *self._median)

    def _idle(self) -> Iterator[Diagnosed]:
        idle = list(self._windows)[-2:]
        if len(idle) == 2 and all(window.waited > IDLE and window.waited_s > IDLE_S for window in idle):
            yield Diagnosed(
                "waits for data",
                idle[-1].last,
                f"in steps {idle[0].first} to {idle[1].last} rank 0 waited for data for {idle[1].waited:.0%} of the time "
                f"({1e3 * idle[1].waited_s:.3g} ms a step)",
                "raise data.loader_processes, or make __getitem__ and collate cheaper (lockstep check measures both)",
            )

    def _skips(self) -> Iterator[Diagnosed]:
        skipped = list(self._windows)[-2:]
        if len(skipped) == 2 and skipped[0].first > 1 and all(window.skipped > SKIPPED for window in skipped):
            yield Diagnosed(
                "fp16 overflow",
                skipped[-1].last,
                f"{skipped[-1].skipped:.0%} of steps {skipped[-1].first} to {skipped[-1].last} were skipped: their gradients overflow in fp16",
                "use precision bf16 or fp32, or lower optimizer.lr",
            )

    def _moves(self) -> Iterator[Diagnosed]:
        """Report a loss that rises, or one that does not move."""
        if self._start is None or self.trained or self._windows[0].first != 1:
            return
        first, newest = self._windows[0], list(self._windows)[-2:]
        where = f"{self._start:.4g} in the first steps and {newest[-1].loss:.4g} in steps {newest[-1].first} to {newest[-1].last}"
        # If the first updates threw the model far away, the mean of the first steps says nothing.
        baseline = min(self._start, self._initial) if self._is_hot() else self._start
        if len(self._windows) > 2 and all(_above(window, baseline, RISEN) for window in newest):
            yield Diagnosed(
                "rate too high",
                newest[-1].last,
                f"the loss has risen: {baseline:.4g} in the first steps and {newest[-1].loss:.4g} in steps {newest[-1].first} to {newest[-1].last}, at a rate of {newest[-1].rate:g}{self._ratios()}",
                f"lower optimizer.lr (try {newest[-1].rate / 10:g}, or lockstep lr-find), warm up, or set clip_norm",
            )
        elif len(self._windows) >= FLAT_WINDOWS:
            since = list(self._windows)[1 - FLAT_WINDOWS :]
            if (
                DEAD not in self.reported
                and _means_are_equal([first], since)
                and _is_at_start(since, self._start)
            ):
                yield self._flat(newest[-1], where)

    def _is_hot(self) -> bool:
        """Whether the newest updates were almost as large as the weights, or larger."""
        ratios = [
            max(_ratios(observation).values(), default=0.0)
            for observation in list(self._observed)[-HIGH_TIMES:]
        ]
        return len(ratios) == HIGH_TIMES and min(ratios) > HIGH_RATIO

    def _flat(self, newest: Window, where: str) -> Diagnosed:
        ratios = [
            max(_ratios(observation).values(), default=math.inf) for observation in list(self._observed)[1:]
        ]
        if len(ratios) > 1 and all(0 < ratio < LOW_RATIO for ratio in ratios):
            return Diagnosed(
                "rate too low",
                newest.last,
                f"the loss does not move: {where}; the largest update of a layer group is {max(ratios):.1g} of its weights",
                f"raise optimizer.lr, which is {newest.rate:g} (lockstep lr-find suggests one)",
            )
        return Diagnosed(
            "loss does not move",
            newest.last,
            f"the loss is {where}{self._ratios()}",
            "look for labels that do not belong to their samples, for a loss that does not depend on the outputs, and at the rate "
            "(lockstep check, lockstep lr-find)",
        )

    def _ratios(self) -> str:
        ratios = _ratios(self._observed[-1]) if self._observed else {}
        if not ratios:
            return ""
        group = max(ratios, key=lambda name: ratios[name])
        return f"; the largest update is {ratios[group]:.1g} of the weights, in {group!r}"

    def _plateau(self) -> Iterator[Diagnosed]:
        highest = max(window.rate for window in self._windows)
        ended: list[Window] = []
        for window in reversed(self._windows):
            if window.rate > ENDED * highest:
                break
            ended.append(window)
        steps = self._windows[-1].last - self._windows[0].first + 1
        if len(ended) < 3 or len(ended) * WINDOW < ENDED_SHARE * steps:
            return
        half = len(ended) // 2
        if _means_are_equal(ended[half:], ended[:half]):
            yield Diagnosed(
                "plateau",
                ended[0].last,
                f"since step {ended[-1].first} the rate is below {ENDED:g} of its highest ({highest:g}), and the loss stays at {ended[0].loss:.4g}",
                "end the run there, or have the schedule end with the run",
            )

    # --- evaluations --------------------------------------------------------------------------------------

    def _evaluation(self, row: EvaluationRow) -> Iterator[Diagnosed]:
        loss = row.metrics.get("eval/loss", math.nan)
        # An evaluation may be told some steps later than the one that it is of.
        recent = [step_row.loss for step_row in self._open if step_row.step <= row.step] or [
            window.loss for window in self._windows if window.first <= row.step
        ][-1:]
        if not math.isfinite(loss) or not recent or loss <= 0:
            return
        self._evaluations.append((row, statistics.fmean(recent[-WINDOW:])))
        yield from self._differs()
        yield from self._overfits()

    def _differs(self) -> Iterator[Diagnosed]:
        early = [(row, train) for row, train in self._evaluations if row.epoch == 0]
        if len(early) < 2 or not all(0 < OTHER * train < _loss(row) for row, train in early):
            return
        row, train = early[-1]
        yield Diagnosed(
            DIFFERS,
            row.step,
            f"the evaluation loss is {_loss(row):.4g} after step {row.step} and the training loss {train:.4g}, in the first epoch, in which no sample "
            "was seen twice",
            "look for preprocessing that only one of the two has, for a label map of its own, and for statistics of a norm that training does not use",
        )

    def _overfits(self) -> Iterator[Diagnosed]:
        if DIFFERS in self.reported:
            return
        best, train = min(self._evaluations, key=lambda evaluation: _loss(evaluation[0]))
        since = [(row, recent) for row, recent in self._evaluations if row.step > best.step]
        worse = since[-WORSE_TIMES:]
        if len(worse) < WORSE_TIMES or best.epoch == worse[-1][0].epoch:
            return
        rises = all(
            _loss(evaluation) < _loss(following) for (evaluation, _), (following, _) in pairwise(worse)
        )
        row, recent = worse[-1]
        lost, fallen = _loss(row) - _loss(best), _loss(self._evaluations[0][0]) - _loss(best)
        if rises and _loss(row) > WORSE * _loss(best) and lost > LOST * fallen and recent < train:
            yield Diagnosed(
                "overfitting",
                row.step,
                f"the evaluation loss was best after step {best.step} ({_loss(best):.4g}) and is {_loss(row):.4g} after step {row.step}, while the "
                f"training loss fell from {train:.4g} to {recent:.4g}",
                "stop early (early_stop keeps the best weights), or regularise: weight decay, dropout, augmentation, more data",
            )

    # --- observations -------------------------------------------------------------------------------------

    def _observation(self, row: Observation) -> Iterator[Diagnosed]:
        self._observed.append(row)
        yield from self._dead()
        yield from self._underflows()
        yield from self._costs()
        yield from self._grows()

    def _dead(self) -> Iterator[Diagnosed]:
        newest = list(self._observed)[-SILENT_TIMES:]
        for name, share in newest[-1].values.items():
            if not name.endswith("/silent_units"):
                continue
            if len(newest) == SILENT_TIMES and all(
                observation.values.get(name, 0.0) >= SILENT for observation in newest
            ):
                group = name.removeprefix("layers/").removesuffix("/silent_units")
                yield Diagnosed(
                    DEAD,
                    newest[-1].step,
                    f"{share:.0%} of the units of {group!r} had a gradient of exactly zero for the whole batch in steps "
                    f"{', '.join(str(observation.step) for observation in newest)}",
                    "lower optimizer.lr, use an activation without a flat side (leaky ReLU, GELU), or look at the initial biases; where the group is "
                    "meant to rest, set requires_grad to False",
                )

    def _underflows(self) -> Iterator[Diagnosed]:
        newest = list(self._observed)[-SILENT_TIMES:]
        shares = [observation.values.get("fp16/underflow", 0.0) for observation in newest]
        if len(shares) == SILENT_TIMES and min(shares) > UNDERFLOW:
            yield Diagnosed(
                "fp16 underflow",
                newest[-1].step,
                f"{shares[-1]:.0%} of the gradient's elements are smaller than what fp16 has full precision for, at a scale of "
                f"{newest[-1].values.get('fp16/scale', math.nan):g}",
                "use precision bf16 or fp32",
            )

    def _costs(self) -> Iterator[Diagnosed]:
        """Report a precision in which a gradient is mostly rounding error."""
        newest = self._observed[-1]
        for name, value in newest.values.items():
            if not name.endswith("/gradient_difference"):
                continue
            differences = self._apart[name] = [*self._apart.get(name, []), (newest.step, value)][
                -APART_TIMES:
            ]
            if len(differences) < APART_TIMES or min(value for _, value in differences) <= APART:
                continue
            precision, *phase = name.split("/")[:-1]
            of = f" of phase {phase[0]!r}" if phase else ""
            loss = newest.values.get(name.replace("gradient_", "loss_"), math.nan)
            yield Diagnosed(
                "precision",
                newest.step,
                f"the gradient{of} of a micro-batch in {precision} differs from that in fp32 by {differences[-2][1]:.0%} of its norm in step {differences[-2][0]} "
                f"and by {value:.0%} in step {newest.step}, and its loss by {loss:.2g} of its own",
                "use precision fp32, or take what is subtracted or summed in the loss out of autocast (outputs.float(), "
                "torch.autocast(..., enabled=False)), and centre and scale the targets",
            )

    def _grows(self) -> Iterator[Diagnosed]:
        if len(self._observed) < GROWTH_TIMES or GRAPH_KEPT in self.reported:
            return
        for name in self._observed[-1].values:
            if not (name.startswith("perf/memory/") and name.endswith("_mb")):
                continue
            memory = [sample.values.get(name, math.nan) for sample in self._observed]
            if all(sample < following for sample, following in pairwise(memory)) and (
                memory[-1] > GROWTH * memory[0] and memory[-1] > memory[0] + GROWTH_MB
            ):
                first, last = self._observed[0].step, self._observed[-1].step
                yield Diagnosed(
                    "memory grows",
                    last,
                    f"{name.removeprefix('perf/memory/').removesuffix('_mb')} held {memory[0]:.0f} MB after step {first} and {memory[-1]:.0f} MB after step "
                    f"{last}, more each time ({1e3 * (memory[-1] - memory[0]) / (last - first):.3g} kB a step)",
                    "look for a list, a cache or a figure in the job that is added to in each step; keep numbers, not tensors",
                )


def of(rows: Sequence[Recorded], reported: Collection[str] = (), *, trained: bool = False) -> list[Diagnosed]:
    """What these rows show, in their order."""
    diagnosis = Diagnosis(set(reported), trained)
    return [finding for row in rows for finding in diagnosis.take(row)]


def _window(rows: Sequence[StepRow], losses: Sequence[float]) -> Window:
    seconds, waited = sum(row.step_s for row in rows), sum(row.data_wait_s for row in rows)
    return Window(
        first=rows[0].step,
        last=rows[-1].step,
        loss=statistics.fmean(losses),
        noise=statistics.pstdev(losses),
        rate=max(row.lr for row in rows),
        waited=waited / seconds if seconds > 0 else 0.0,
        waited_s=waited / len(rows),
        skipped=sum(row.skipped for row in rows) / len(rows),
    )


def _bound(losses: Sequence[float]) -> tuple[float, float]:
    """The median, and the bound above which a loss is a spike."""
    median = statistics.median(losses)
    low, _, high = statistics.quantiles(losses, n=4)
    return median, median + max(SPIKE_SPREADS * (high - low), (SPIKE - 1) * abs(median))


def _error(window: Window) -> float:
    """The standard error of the window's mean loss."""
    return window.noise / math.sqrt(WINDOW)


def _means_are_equal(first: Sequence[Window], second: Sequence[Window]) -> bool:
    """Whether the mean losses of two groups of windows differ by next to nothing, and by no more than their noise."""
    mean, other_mean = (statistics.fmean(window.loss for window in windows) for windows in (first, second))
    difference = abs(mean - other_mean)
    return difference <= FLAT * abs(mean) and difference <= 3 * math.hypot(
        _error_of(first), _error_of(second)
    )


def _is_at_start(windows: Sequence[Window], start: float) -> bool:
    """Whether the mean loss of some windows equals that of the first ten steps, within their noise."""
    mean = statistics.fmean(window.loss for window in windows)
    return abs(mean - start) <= FLAT * abs(start) + 3 * windows[0].noise / math.sqrt(10)


def _error_of(windows: Sequence[Window]) -> float:
    return math.sqrt(sum(_error(window) ** 2 for window in windows)) / len(windows)


def _above(window: Window, start: float, times: float) -> bool:
    return window.loss > times * start > 0 and window.loss - start > 4 * _error(window)


def _loss(row: EvaluationRow) -> float:
    return row.metrics["eval/loss"]


def _ratios(row: Observation) -> dict[str, float]:
    """The update-to-weight ratios by group."""
    return {
        name.removeprefix("layers/").removesuffix("/update_ratio"): value
        for name, value in row.values.items()
        if name.endswith("/update_ratio")
    }
