"""The runs of a command, one after the other or in several processes, which import this module by its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

import kfac_optim
from benchmarks.common.runs import Line, progress
from benchmarks.swap.training import Run, Training

NUDGE = 1e-3  # the share by which the weights of a base that runs again are changed
AGAIN = (f"the base again, weights changed by {NUDGE:g}",)  # in the place of the swap's options

Job = tuple[Training, int, tuple[str, ...], bool]  # with its seed, options, and whether the base runs, too


def keywords(options: Sequence[str]) -> dict[str, Any]:
    """Return the keywords that ``NAME=EXPRESSION`` stand for, in terms of kfac_optim's names, torch and math.

    Raises:
        ValueError: If one has no "=" or its expression cannot be evaluated.
    """
    names = {name: getattr(kfac_optim, name) for name in kfac_optim.__all__} | {
        "torch": torch,
        "kfac_optim": kfac_optim,
    }
    given = {}
    for option in options:
        name, equals, expression = option.partition("=")
        try:
            given[name] = eval(expression, dict(names))
        except Exception as error:
            raise ValueError(f"--option {option}: {error or 'must be NAME=EXPRESSION'}") from error
    return given


def identity(training: Training, seed: int, options: Sequence[str] | None) -> Line:
    """Return what must agree for a run of a file to stand for one of this command; ``options`` None: the base's."""
    return {**training.settings(), "seed": seed, "swap": None if options is None else list(options)}


def work(job: Job) -> list[Line]:
    """Run one training with one seed by the base, if asked to, and by the swap; return their lines."""
    training, seed, options, with_base = job
    lines = []
    for kfac in (None, options) if with_base else (options,):
        if kfac == AGAIN:
            run = Run(training, seed, None, nudge=NUDGE)
        else:
            run = Run(training, seed, None if kfac is None else keywords(kfac))
        lines.append({"run": identity(training, seed, kfac), **run.finish()})
    return lines


def every(jobs: Sequence[Job], processes: int) -> Iterator[list[Line]]:
    """Yield the lines of each job, as it ends, under a progress bar."""
    with progress(len(jobs), "swap", "pair", leave=False) as bar:
        if processes == 1:
            for job in jobs:
                bar.set_postfix_str(f"{job[0].name} seed {job[1]}")
                yield work(job)
                bar.update()
            return
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(work, job) for job in jobs]):
                yield done.result()
                bar.update()
