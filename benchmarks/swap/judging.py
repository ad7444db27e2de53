"""When the swap counts as behind its base, for one training and for a half of the suite."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.common.runs import Line

if TYPE_CHECKING:
    from benchmarks.swap.training import Training

SHARES = (0.1, 0.25, 0.5, 1.0)  # of a run, where both are compared
SLACK = 0.02  # the swap is behind if it is above the base by more than this share of the scale
WINDOW, SHORTEST = 0.05, 10  # what is compared is a mean over this share of all steps, at least so many
CURVE = 100  # most points of a curve in the file


def window(steps: int) -> int:
    """Return the number of steps that a mean is taken over."""
    return max(SHORTEST, round(WINDOW * steps))


def window_before(losses: Sequence[float], share: float) -> float:
    """Return the mean over the window that ends at ``share`` of the run; NaN if a loss in it is not finite."""
    end = max(1, round(share * len(losses)))
    return mean(losses[max(0, end - window(len(losses))) : end])


def first_window(losses: Sequence[float]) -> float:
    """Return the mean over the first window."""
    return mean(losses[: window(len(losses))])


def mean(values: Iterable[float | None]) -> float:
    """Return the mean; NaN if a value is missing or not finite."""
    known = [math.nan if value is None else value for value in values]
    return statistics.fmean(known) if known and all(map(math.isfinite, known)) else math.nan


def thinned(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Return at most ``CURVE`` pairs of a step (from 1) and the mean loss of the steps since the pair before."""
    ends = sorted({round(len(losses) * place / CURVE) for place in range(1, CURVE + 1)} - {0})
    return [(end, mean(losses[start:end])) for start, end in zip([0, *ends], ends, strict=False)]


def is_behind(base: float, swap: float, scale: float) -> bool:
    """Say whether ``swap`` is above ``base`` by more than the slack, or not finite where the base is.

    Args:
        base: Mean of the base's window.
        swap: Mean of the swap's.
        scale: What the slack is a share of: the base's own value, or its whole drop where values can be negative or end
            in noise.
    """
    if not math.isfinite(swap):
        return math.isfinite(base)
    return math.isfinite(base) and swap - base > SLACK * abs(scale)


@dataclass(frozen=True)
class Pair:
    """The same number of base and swap runs, or means over them, at the points of ``SHARES``."""

    base: list[float]
    swap: list[float]
    first: float  # The base's first window
    of_drop: bool  # Whether slack is a share of the whole drop, not of the value
    base_held_out: float = math.nan
    swap_held_out: float = math.nan

    def scale(self, base: float) -> float:
        """Return what the slack at a point is a share of, where the base has ``base``."""
        return self.first - self.base[-1] if self.of_drop else base

    @property
    def behind(self) -> list[bool]:
        """Whether the swap is behind, point by point."""
        return [is_behind(b, s, self.scale(b)) for b, s in zip(self.base, self.swap, strict=True)]

    @property
    def differences(self) -> list[float]:
        """Swap less base, as a share of the scale, point by point."""
        scales = [abs(self.scale(b)) or math.nan for b in self.base]
        return [(s - b) / scale for b, s, scale in zip(self.base, self.swap, scales, strict=True)]

    @property
    def lower_at_the_end(self) -> bool:
        """Whether the swap ends below its base."""
        return self.swap[-1] < self.base[-1]

    @property
    def held_out_difference(self) -> float | None:
        """The swap's held-out loss less the base's, as a share of the scale; None where there is none."""
        if not math.isfinite(self.base_held_out):
            return None
        return (self.swap_held_out - self.base_held_out) / (abs(self.scale(self.base_held_out)) or math.nan)

    @property
    def held_out_not_worse(self) -> bool | None:
        """Whether the swap's held-out loss is not behind the base's; None where there is none."""
        if not math.isfinite(self.base_held_out):
            return None
        return not is_behind(self.base_held_out, self.swap_held_out, self.scale(self.base_held_out))


@dataclass(frozen=True)
class Verdict:
    """Base and swap runs of one training, seed by seed."""

    training: Training
    base: list[Line]
    swap: list[Line]

    def _pair(self, base: Sequence[Line], swap: Sequence[Line]) -> Pair:
        points = [
            [mean(column) for column in zip(*(run["points"] for run in runs), strict=True)] for runs in (base, swap)
        ]
        held_out = [mean(run["held_out"] for run in runs) for runs in (base, swap)]
        return Pair(
            points[0], points[1], mean(run["first"] for run in base), self.training.of_drop, held_out[0], held_out[1]
        )

    @property
    def mean(self) -> Pair:
        """Means over the seeds."""
        return self._pair(self.base, self.swap)

    @property
    def seeds(self) -> list[Pair]:
        """Every seed for itself."""
        return [self._pair([base], [swap]) for base, swap in zip(self.base, self.swap, strict=True)]

    @property
    def seconds(self) -> float:
        """CPU seconds of a base run."""
        return mean(run["cpu_seconds"] for run in self.base)

    @property
    def time_ratio(self) -> float:
        """The swap's CPU seconds over the base's, of all seeds."""
        return sum(run["cpu_seconds"] for run in self.swap) / sum(run["cpu_seconds"] for run in self.base)

    @property
    def steps_to_the_end(self) -> float:
        """After which share of the base's steps the swap has its final loss, median over the seeds; inf: never."""
        ends = [mean(run["points"][-1:]) for run in self.base]
        return statistics.median(reached(run, end) for run, end in zip(self.swap, ends, strict=True))

    @property
    def seconds_to_the_end(self) -> float:
        """The same of the base's CPU seconds."""
        return self.steps_to_the_end * self.time_ratio


def reached(run: Line, loss: float) -> float:
    """Return the share of a run after which its mean over the window is at ``loss``; infinite where it never is."""
    steps = [0, *(step for step, _ in run["curve"])]
    for last in range(1, len(steps)):
        first = max((i for i in range(last) if steps[last] - steps[i] >= window(steps[-1])), default=None)
        if first is not None and mean(value for _, value in run["curve"][first:last]) <= loss:
            return steps[last] / steps[-1]
    return math.inf


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the figures that stand for all of ``verdicts``."""
    seeds = [pair for verdict in verdicts for pair in verdict.seeds]
    held_out = [pair.held_out_not_worse for pair in seeds if pair.held_out_not_worse is not None]
    ends = [(pair.base[-1], pair.swap[-1]) for pair in (verdict.mean for verdict in verdicts) if not pair.of_drop]
    return {
        "behind": share([behind for verdict in verdicts for behind in verdict.mean.behind]),
        "behind, single seeds": share([behind for pair in seeds for behind in pair.behind]),
        "lower at the end": share([pair.lower_at_the_end for pair in seeds]),
        "held out not worse": share(held_out),
        "final loss": geometric([swap / base for base, swap in ends if base > 0 and swap != 0]),
        "time": geometric([verdict.time_ratio for verdict in verdicts]),
        "steps": middle([verdict.steps_to_the_end for verdict in verdicts]),
        "seconds": middle([verdict.seconds_to_the_end for verdict in verdicts]),
        "sooner": share([verdict.seconds_to_the_end < 1 for verdict in verdicts]),
    }


def share(flags: Sequence[bool]) -> str:
    """Return "true / all"."""
    return f"{sum(flags)} / {len(flags)}"


def middle(values: Sequence[float]) -> float | None:
    """Return the median; None where that is infinite."""
    found = statistics.median(values)
    return found if math.isfinite(found) else None


def geometric(ratios: Sequence[float]) -> float | None:
    """Return the geometric mean; None of nothing, and where a ratio is not finite, as of a swap that has failed."""
    return statistics.geometric_mean(ratios) if ratios and all(map(math.isfinite, ratios)) else None
