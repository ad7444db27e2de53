"""What a training step costs: seconds by kind of step, and peak memory, of optimizers that take turns.

A step of K-FAC is of one of few kinds: *ordinary* (the gradient is preconditioned), *statistics* (factors are updated
as well), *refresh j* (step ``j`` of a refresh: 0 alone does all of it, or it is spread over ``j = 0..spread``). Each
kind is timed by itself, by setting the engine's intervals before the step; the cost of any schedule follows by
arithmetic (:func:`compose`). One period of "every 50/500" so costs the time of a few steps instead of 500.

All optimizers take turns step by step, so that disturbances of the machine hit all of them alike. On the CPU seconds
are those of ``time.process_time``; on a GPU those of the wall, between synchronisations.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import math
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.common.optimizers import OPTIMIZERS, find
from benchmarks.common.reports import grid, table
from benchmarks.common.settings import OPTIMIZER_DEFAULTS, RECIPES
from benchmarks.common.works import Work
from benchmarks.scaling.cluster import Schedule
from kfac_optim import CurvatureEngine, EigenSolver, InverseSolver, growing
from kfac_optim.schedules import value_at

NEVER = 10**9  # an interval longer than any run
ORDINARY = "ordinary"
BATCHES = 4  # that a run goes through in turn
LATE = 1000  # the step at which schedules that are callables are looked at
LARGEST = 8192  # factor that ours does not keep diagonal, ``max_factor_dim``
HEADROOM = 1.2  # of the bound on memory: on the base optimizer's peak
LR = 1e-4  # no time depends on it

Seconds = dict[str, list[float]]  # by kind of step

# Solvers by name: those that the package has a name for (and kfac-pytorch has, too), and their options.
PLAIN_SOLVERS = ("eigen", "inverse")
SOLVERS: dict[str, Any] = {
    **{name: name for name in PLAIN_SOLVERS},
    "eigen-exact": EigenSolver(negligible=0),
    "eigen-overlap": EigenSolver(overlap=True),
    "inverse-overlap": InverseSolver(overlap=True),
    "eigen-qr": EigenSolver(refresh="qr"),
}


# Schedules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A kind of step, and what has to begin at it."""

    kind: str
    statistics: bool = False
    refresh: bool = False


def refresh_kind(elapsed: int) -> str:
    """Name of the step that many steps after the start of a refresh."""
    return f"refresh {elapsed}"


def kinds(spread: int) -> list[str]:
    """The kinds of step there are."""
    return [ORDINARY, "statistics", *map(refresh_kind, range(spread + 1))]


def turns(spread: int) -> list[Turn]:
    """One round over all kinds; ordinary steps, which are most of any schedule, twice."""
    later = [Turn(refresh_kind(elapsed)) for elapsed in range(1, spread + 1)]
    first = [Turn(ORDINARY), Turn("statistics", statistics=True), Turn(ORDINARY), Turn(refresh_kind(0), refresh=True)]
    return [*first, *later]


def compose(schedule: Schedule, spread: int, seconds: Mapping[str, float]) -> tuple[float, float]:
    """Return mean and largest seconds of a step over one period of ``schedule``.

    What a kind of step takes beyond an ordinary one adds up where statistics and a refresh fall on the same step.

    Args:
        schedule: The intervals.
        spread: Steps over which a refresh is worked off, smaller than its interval.
        seconds: Of one step of each of :func:`kinds`.
    """
    ordinary = seconds[ORDINARY]
    statistics_ = seconds["statistics"] - ordinary
    refresh = [seconds[refresh_kind(elapsed)] - ordinary for elapsed in range(spread + 1)]
    steps = []
    for step in range(math.lcm(schedule.statistics, schedule.decompositions)):
        elapsed = step % schedule.decompositions
        updates = statistics_ if step % schedule.statistics == 0 else 0.0
        steps.append(ordinary + updates + (refresh[elapsed] if elapsed <= spread else 0.0))
    return statistics.fmean(steps), max(steps)


def schedule_of(engine: CurvatureEngine) -> tuple[Schedule, int]:
    """Return intervals and spread of an engine, those of step ``LATE`` where they depend on the step."""
    refresh = int(value_at(engine.inv_update_steps, LATE))
    default = max(1, refresh // 5) if isinstance(engine.inv_update_steps, growing) else 10
    given = engine.factor_update_steps
    statistics_ = default if given is None else int(value_at(given, LATE))
    spread = refresh // 10 if engine.spread is None else int(value_at(engine.spread, LATE))
    return Schedule(statistics_, refresh), spread


# Optimizers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """An optimizer with its settings.

    Attributes:
        label: Of the tables.
        optimizer: Name in ``OPTIMIZERS``: of the base optimizer, of ours, or of that behind kfac-pytorch.
        options: K-FAC keywords.
        peer: kfac-pytorch's preconditioner stands before the optimizer.
        own_schedule: Only the schedule that the optimizer has by itself is of interest.
    """

    label: str
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    peer: bool = False
    own_schedule: bool = False

    @property
    def is_base(self) -> bool:
        """Whether there is no K-FAC in it."""
        return OPTIMIZERS[self.optimizer].base is None and not self.peer

    def build(self, model: nn.Module, work: Work) -> tuple[Any, Any]:
        """Return the optimizer, and what keeps its curvature: the engine, kfac-pytorch's preconditioner, or None."""
        rates = {"lr": LR, **OPTIMIZER_DEFAULTS.get(self.optimizer, {})}
        if OPTIMIZERS[self.optimizer].base:
            keywords = {"loss_average": work.loss_average, **work.kfac, **self.options}
            keywords["solver"] = SOLVERS[keywords.get("solver", "eigen")]
            optimizer: Any = find(self.optimizer)(model.parameters(), model=model, **rates, **keywords)
            return optimizer, optimizer.curvature
        optimizer = find(self.optimizer)(model.parameters(), **rates)
        return optimizer, attach_peer(optimizer, model, **self.options) if self.peer else None


def attach_peer(optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any) -> Any:
    """Let kfac-pytorch's preconditioner work before every step of ``optimizer``; return it."""
    keywords = {"lr": lambda _: optimizer.param_groups[0]["lr"], **options}
    preconditioner = importlib.import_module("kfac.preconditioner").KFACPreconditioner(model, **keywords)
    optimizer.register_step_pre_hook(lambda *_: preconditioner.step())
    return preconditioner


def has_peer() -> bool:
    """Say whether kfac-pytorch can be imported."""
    return importlib.util.find_spec("kfac") is not None


def contenders(
    work: Work,
    optimizer: str,
    solvers: Sequence[str],
    *,
    spread: int | None = 0,
    fractions: Sequence[float] = (1.0,),
    default: bool = False,
) -> list[Contender]:
    """Return the base of a K-FAC optimizer, then that in the paper's mode with each solver, and kfac-pytorch likewise.

    Args:
        work: What they are to train.
        optimizer: Name of the K-FAC optimizer.
        solvers: Names in ``SOLVERS``.
        spread: Steps of a refresh, in the paper's mode; None: a tenth of the interval, the package's default.
        fractions: Of a batch's examples, those that statistics see, in the paper's mode; each is a row.
        default: One more: what the package does by itself.
    """
    base = OPTIMIZERS[optimizer].base
    assert base is not None
    paper = {name: value for name, value in RECIPES["paper"].kfac.items() if not name.endswith("_steps")}
    found = [Contender(base, base)]
    for solver, fraction in itertools.product(solvers, fractions):
        options = {**paper, "damping": 0.03, "solver": solver, "spread": spread, "factor_batch_fraction": fraction}
        share = "" if fraction == 1 else f", {fraction:g} of the batch"
        found.append(Contender(f"{optimizer} {solver}{share}", optimizer, options))
    if default:
        found.append(Contender(f"{optimizer} defaults", optimizer, own_schedule=True))
    # A large vocabulary's factor, which ours keeps diagonal, kfac-pytorch could not decompose.
    skipped = [*work.kfac.get("skip_layers", ()), *(("head", "decoder") if work.symbols > LARGEST else ())]
    for solver in [name for name in solvers if name in PLAIN_SOLVERS] if has_peer() else ():
        options = {"compute_method": solver, "skip_layers": skipped}
        found.append(Contender(f"kfac-pytorch {solver} + {base}", base, options, peer=True))
    return found


# Steps ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where and in which precision steps run.

    Attributes:
        device: "cpu" or "cuda".
        dtype: "float32", with torch's own choice of TF32 (on GPUs in convolutions), or "bf16": autocast to bfloat16.
        threads: Of torch.
        seed: Of weights and data.
        wall: On the CPU take the time of the wall as well, not that of the process in all of its threads.
    """

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    seed: int = 0
    wall: bool = False

    def now(self) -> float:
        """Return the seconds of the clock: of this process's CPU time, or of the wall's once the GPU has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() if self.wall or self.device == "cuda" else time.process_time()


class Run:
    """Model, batches and optimizer of one contender."""

    def __init__(self, work: Work, contender: Contender, place: Place) -> None:
        torch.set_num_threads(place.threads)
        torch.manual_seed(place.seed)
        self.work, self.place = work, place
        self.model = work.make().to(place.device)
        self.optimizer, self.keeper = contender.build(self.model, work)
        self.batches = [
            tuple(part.to(place.device) for part in work.data(place.seed + number)) for number in range(BATCHES)
        ]
        self.steps = 0
        self.loss = torch.zeros(())
        engine = isinstance(self.keeper, CurvatureEngine)
        self.schedule, self.spread = schedule_of(self.keeper) if engine else (Schedule(), 0)
        self.kinds = [ORDINARY] if contender.is_base else kinds(self.spread)

    def set_schedule(self, schedule: Schedule) -> None:
        """Set the intervals from the coming step on."""
        if isinstance(self.keeper, CurvatureEngine):
            self.keeper.factor_update_steps = schedule.statistics
            self.keeper.inv_update_steps = schedule.decompositions
        elif self.keeper is not None:  # kfac-pytorch has properties without setters
            self.keeper._factor_update_steps = schedule.statistics
            self.keeper._inv_update_steps = schedule.decompositions

    def spread_under(self, schedule: Schedule) -> int:
        """Return over how many steps a refresh is worked off."""
        by_default = isinstance(self.keeper, CurvatureEngine) and self.keeper.spread is None
        return schedule.decompositions // 10 if by_default else self.spread

    def step(self) -> float:
        """Take one step; return its seconds."""
        inputs, targets = self.batches[self.steps % BATCHES]
        begin = self.place.now()
        self.optimizer.zero_grad()
        with torch.autocast(self.place.device, torch.bfloat16, enabled=self.place.dtype == "bf16"):
            loss = self.work.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        seconds = self.place.now() - begin
        self.steps, self.loss = self.steps + 1, loss.detach()
        return seconds

    def take(self, turn: Turn) -> float:
        """Take one step of a kind; return its seconds."""
        self.set_schedule(Schedule(1 if turn.statistics else NEVER, 1 if turn.refresh else NEVER))
        return self.step()

    @property
    def curvature_bytes(self) -> int:
        """Bytes of factors and decompositions, as their keeper counts them."""
        if self.keeper is None:
            return 0
        of_engine = isinstance(self.keeper, CurvatureEngine)
        return (self.keeper.memory_estimate() if of_engine else self.keeper.memory_usage())["total"]

    def check(self) -> None:
        """Refuse to have timed steps that were skipped.

        Raises:
            RuntimeError: If the loss is not finite, or a step was left out because of its gradients.
        """
        if not self.loss.isfinite() or getattr(self.keeper, "skipped_steps", False):
            raise RuntimeError(f"{self.work.title}: training diverged, its times mean nothing")


def take_turns(runs: Mapping[str, Run], budget: float) -> dict[str, Seconds]:
    """Time rounds of :func:`turns`, every run one step at each turn.

    Args:
        runs: By label.
        budget: Seconds after which no further round begins; the first begins in any case.

    Returns:
        The seconds of all steps, by run and kind.
    """
    everything = turns(max(run.spread for run in runs.values()))
    for run in runs.values():
        if isinstance(run.keeper, CurvatureEngine):
            run.keeper.spread = run.spread  # whatever the intervals of a turn
    seconds: dict[str, Seconds] = {label: {kind: [] for kind in run.kinds} for label, run in runs.items()}
    end = time.perf_counter() + budget
    with tqdm(desc="rounds", unit="round", mininterval=5) as bar:
        while not bar.n or time.perf_counter() < end:
            for turn in everything:
                for label, run in runs.items():
                    seconds[label][turn.kind if turn.kind in run.kinds else ORDINARY].append(run.take(turn))
            bar.update()
    return seconds


def take_period(runs: Mapping[str, Run], schedule: Schedule) -> dict[str, list[float]]:
    """Time every step of one period of ``schedule``, the runs taking turns.

    It begins ``spread`` steps after a refresh, so that it holds all steps of every refresh.
    """
    for run in runs.values():
        run.take(Turn("everything", statistics=True, refresh=True))
        run.set_schedule(schedule)
        for _ in range(run.spread):
            run.step()
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    for _ in tqdm(range(math.lcm(schedule.statistics, schedule.decompositions)), desc="period", mininterval=5):
        for label, run in runs.items():
            seconds[label].append(run.step())
    return seconds


# Memory --------------------------------------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """Return how many bytes ``work`` had allocated at once, at most; on the CPU within torch's operators, too."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    results: Any = trace.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # negative where memory is given back
        peak = max(peak, held)
    return peak


def begin(work: Work, contender: Contender, place: Place) -> tuple[Run, int]:
    """Start a run with a step of each kind; return it and its peak, of model, batches, optimizer and these steps."""
    started: list[Run] = []

    def every_kind() -> None:
        started.append(Run(work, contender, place))
        started[0].step()
        for turn in turns(started[0].spread):
            started[0].take(turn)

    peak = peak_bytes(every_kind, place.device)
    return started[0], peak


# Results -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Seconds of a step under a schedule: their mean, the mean as the medians have it, and the worst step's."""

    mean: float
    median: float
    worst: float

    @classmethod
    def composed(cls, schedule: Schedule, spread: int, seconds: Seconds) -> Cost:
        """From the seconds of each kind of step."""
        mean, worst = compose(schedule, spread, {kind: statistics.fmean(each) for kind, each in seconds.items()})
        median, _ = compose(schedule, spread, {kind: statistics.median(each) for kind, each in seconds.items()})
        return cls(mean, median, worst)

    @classmethod
    def observed(cls, seconds: Sequence[float]) -> Cost:
        """From the seconds of every step."""
        return cls(statistics.fmean(seconds), statistics.median(seconds), max(seconds))


def around(seconds: Sequence[float]) -> list[float]:
    """For each step the median of up to eleven around it: a machine's speed drifts in the minutes of a period."""
    return [statistics.median(seconds[max(0, i - 5) : i + 6]) for i in range(len(seconds))]


def every(schedule: Schedule) -> str:
    """A schedule as the tables have it: statistics every a, decompositions every b steps."""
    return f"{schedule.statistics}/{schedule.decompositions}"


def begin_all(work: Work, chosen: Sequence[Contender], place: Place) -> tuple[dict[str, Run], dict[str, int]]:
    """Start all runs that can be started.

    Returns:
        The runs, and their peaks, by label. kfac-pytorch is left out, with a word, where it cannot train the model.
    """
    runs, peaks = {}, {}
    for contender in chosen:
        try:
            runs[contender.label], peaks[contender.label] = begin(work, contender, place)
        except RuntimeError as error:  # memory, or backward hooks that bear no in-place activations
            if not contender.peer:
                raise
            print(f"{contender.label} on {work.title}: left out, {str(error).splitlines()[0]}")
    return runs, peaks


# By contender and schedule: its cost, and that of the base optimizer beside it.
Costs = dict[tuple[str, Schedule], tuple[Cost, Cost]]


def by_rounds(
    runs: Mapping[str, Run], base: str, wanted: Mapping[str, Sequence[Schedule]], budget: float
) -> tuple[Costs, dict[str, Seconds]]:
    """Time rounds for ``budget`` seconds; return the composed costs, and every step's seconds."""
    measured = take_turns(runs, budget)
    plain = Cost.observed(measured[base][ORDINARY])
    costs = {
        (label, schedule): (Cost.composed(schedule, runs[label].spread, measured[label]), plain)
        for label, own in wanted.items()
        for schedule in own
    }
    return costs, measured


def by_periods(
    runs: Mapping[str, Run], base: str, wanted: Mapping[str, Sequence[Schedule]]
) -> tuple[Costs, dict[str, dict[str, list[float]]]]:
    """Time one period of each schedule; return the costs, and every step's seconds."""
    costs: Costs = {}
    measured = {}
    for schedule in dict.fromkeys(schedule for own in wanted.values() for schedule in own):
        members = [label for label, own in wanted.items() if schedule in own]
        seconds = take_period({label: runs[label] for label in (base, *members)}, schedule)
        plain = Cost.observed(seconds[base])
        for label in members:
            slowest = max(map(operator.truediv, seconds[label], around(seconds[base])))
            costs[label, schedule] = replace(Cost.observed(seconds[label]), worst=slowest * plain.mean), plain
        measured[every(schedule)] = seconds
    return costs, measured


def measure(
    work: Work, chosen: Sequence[Contender], schedules: Sequence[Schedule], place: Place, budget: float | None
) -> dict[str, Any]:
    """Measure the contenders, the base optimizer first, on one work.

    Args:
        work: Model and batch.
        chosen: The contenders.
        schedules: Of the rows.
        place: Device, precision, threads, seed.
        budget: Seconds for the rounds; None: run one period of each schedule, instead of composing it.

    Returns:
        ``base``: seconds and peak memory of the base optimizer; ``rows``: for each other contender and schedule the
        ratios to them; ``measured``: the seconds of all steps.
    """
    base = chosen[0].label
    runs, peaks = begin_all(work, chosen, place)
    own = {contender.label for contender in chosen if contender.own_schedule}
    wanted = {label: [run.schedule] if label in own else schedules for label, run in runs.items() if label != base}
    costs: Costs
    measured: Mapping[str, Any]
    costs, measured = by_periods(runs, base, wanted) if budget is None else by_rounds(runs, base, wanted, budget)
    rows = []
    for (label, schedule), (cost, plain) in costs.items():
        run = runs[label]
        run.check()
        bound = int(HEADROOM * peaks[base] + run.curvature_bytes)
        row = {
            "contender": label,
            "every": every(schedule),
            "spread": run.spread_under(schedule),
            "mean": cost.mean / plain.mean,
        }
        row |= {"medians": cost.median / plain.median, "worst": cost.worst / plain.mean, "seconds": cost.mean}
        sizes = {"peak_bytes": peaks[label], "curvature_bytes": run.curvature_bytes, "bound_bytes": bound}
        rows.append({**row, "base": asdict(plain), **sizes})
    return {
        "work": work.title,
        "place": asdict(place),
        "exact": budget is None,
        "options": {c.label: {"lr": LR, **work.kfac, **c.options} for c in chosen},
        "base": {"contender": base, "peak_bytes": peaks[base]},
        "rows": rows,
        "measured": measured,
    }


def summary(result: Mapping[str, Any], goals: Mapping[tuple[str, str, str], str] | None = None) -> str:
    """Return the table of what :func:`measure` returned.

    Args:
        result: Of one work.
        goals: Mean and worst step to reach, by optimizer, work and schedule.
    """
    base, place = result["base"], result["place"]
    rows = []
    for row in result["rows"]:
        line = {"contender": row["contender"], "every": row["every"], "spread": row["spread"] or None}
        line |= {key: f"{row[key]:.2f}" for key in ("mean", "medians", "worst")}
        goal = goals.get((row["contender"].split()[0], result["work"], row["every"])) if goals else None
        if goal:
            line["goal"] = goal
        peak, bound = row["peak_bytes"], row["bound_bytes"]
        sizes = {"peak MiB": peak, "bound MiB": bound, "curvature MiB": row["curvature_bytes"]}
        rows.append({**line, **{key: value / 2**20 for key, value in sizes.items()}, "within": peak <= bound})
    how = ("one period" if result["exact"] else "composed") + (", time of the wall" if place["wall"] else "")
    seconds = dict.fromkeys(tuple(row["base"].values()) for row in result["rows"])
    listed = "; ".join(", ".join(f"{each:.4g}" for each in times) for times in seconds)
    peak = base["peak_bytes"] / 2**20
    note = f"{base['contender']} = 1.00: mean, median and worst step {listed} s, peak {peak:.4g} MiB"
    title = f"{result['work']}: {place['dtype']} on {place['device']}, {how}"
    return table(title, rows, note)


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the plot: for each work the ratios of mean and worst step, and the peaks beside their bounds."""
    figure, axes = grid(len(results), 2, "Steps with K-FAC over those of the base optimizer")
    for (left, right), result in zip(axes, results, strict=True):
        rows = result["rows"]
        places = range(len(rows))
        left.barh(places, [row["mean"] for row in rows], label="mean")
        left.plot([row["worst"] for row in rows], places, "k|", markersize=12, label="worst step")
        left.axvline(1, color="grey", linewidth=1, linestyle=":")
        left.set(xlabel=f"seconds over {result['base']['contender']}'s mean")
        left.set_title(f"{result['work']}, {result['place']['dtype']}", fontsize="medium")
        right.barh(places, [row["peak_bytes"] / 2**20 for row in rows], label="peak")
        right.plot([row["bound_bytes"] / 2**20 for row in rows], places, "k|", markersize=12, label="bound")
        right.axvline(result["base"]["peak_bytes"] / 2**20, color="grey", linewidth=1, linestyle=":")
        right.set(xlabel=f"MiB (dotted: {result['base']['contender']})")
        left.set_yticks(places, [f"{row['contender']} {row['every']}" for row in rows], fontsize="small")
        right.set_yticks(places, ["" for _ in rows])
        for panel in (left, right):
            panel.invert_yaxis()
            panel.legend(fontsize="small")
    figure.savefig(path, dpi=110)
