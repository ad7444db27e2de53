"""The command line of ``benchmarks.train``: every option, its default and its unit."""

from __future__ import annotations

import argparse
import ast
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.common.optimizers import OPTIMIZERS, REST
from benchmarks.common.settings import COMMON, LEARNING_RATES, OPTIMIZER_DEFAULTS, RECIPES, SCHEDULES, TASK_DEFAULTS
from benchmarks.common.tasks import TASKS

RUNS = Path("runs")
KEY_VALUE = "a keyword of the {}, as a Python value or a word; may be repeated (default: none)"


def task_table() -> str:
    """Return the defaults that depend on task and optimizer, for ``--help``."""
    rows = ["defaults that depend on the task:"]
    for task, values in TASK_DEFAULTS.items():
        shown = {"eval_every": "one epoch", **{name: value for name, value in values.items() if value is not None}}
        rows.append(f"  {task:8}" + ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in shown.items()))
    rows += ["", "default learning rates (--lr):", f"  {'':12}" + "".join(f"{task:>9}" for task in TASKS)]
    for name in OPTIMIZERS:
        rows.append(f"  {name:12}" + "".join(f"{LEARNING_RATES[task][name]:>9g}" for task in TASKS))
    rows += ["", "other defaults of an optimizer:"]
    for name, values in OPTIMIZER_DEFAULTS.items():
        rows.append(f"  {name:12}" + ", ".join(f"--{option} {value}" for option, value in values.items()))
    rows += ["", "recipes (for the K-FAC optimizers; options on the command line take precedence):"]
    for name, recipe in RECIPES.items():
        rows.append(textwrap.fill(recipe.about, 100, initial_indent=f"  {name:10}", subsequent_indent=" " * 12))
    rows += ["", "tasks:"] + [f"  {name:8}{(make.__doc__ or '').splitlines()[0]}" for name, make in TASKS.items()]
    return "\n".join(rows)


def parser() -> argparse.ArgumentParser:
    """Return the parser; options that are not given leave no trace in its result."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.train",
        usage="%(prog)s TASK --optimizer NAME [options]   (--help explains all of them)",
        description="Train a task with an optimizer, log it, plot it, and compare it with others on the same batches.",
        epilog=task_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    command.add_argument("task", metavar="TASK", help=f"one of: {', '.join(TASKS)}")
    command.add_argument(
        "--optimizer", required=True, metavar="NAME", help=f"one of: {', '.join(OPTIMIZERS)} (needed; no default)"
    )
    command.add_argument(
        "--compare",
        metavar="NAME[:LR],...",
        help="train these too, on the same initial weights, batches and schedule, and draw all in one plot. LR: a "
        "learning rate of its own. --lr, --momentum and --option hold for the class that --optimizer is built on "
        "(KFACSGD: SGD); others take their defaults (default: none)",
    )
    add_training_options(command.add_argument_group("training"))
    kfac = command.add_argument_group("K-FAC (KFAC... as --optimizer or in --compare; the others ignore it)")
    names = f"settings that go together: {', '.join(RECIPES)}; see below (default: none)"
    kfac.add_argument("--recipe", metavar="NAME", help=names)
    words = (
        "damping_of=WHAT has damping as a multiple of the mean or largest eigenvalue of the layer's curvature. Words "
        "are growing[:fraction[:minimum]] (inv_update_steps, factor_update_steps), kl_clip:kappa (scaling), "
        "inverse-plain (solver: eqs. 9-10, without pi), and sampled (fisher: the kind of the task's output)"
    )
    kfac.add_argument(
        "--kfac",
        action="append",
        type=assignment,
        metavar="KEY=VALUE",
        help=f"{KEY_VALUE.format('K-FAC optimizer')}. {words}",
    )
    add_output_options(command.add_argument_group("output"))
    return command


def add_training_options(group: argparse._ArgumentGroup) -> None:
    """Add the options every optimizer shares."""
    add = group.add_argument
    add("--lr", type=float, help="learning rate at the top of the schedule (default: by task and optimizer, below)")
    add(
        "--momentum",
        type=float,
        help="in [0, 1), for SGD, KFACSGD, Muon, Shampoo and KFACPyTorch (default: by optimizer, below)",
    )
    add("--weight-decay", type=float, metavar="X", help=f"factor (default: {COMMON['weight_decay']:g})")
    add("--option", action="append", type=assignment, metavar="KEY=VALUE", help=KEY_VALUE.format("base rule"))
    add("--schedule", metavar="NAME", help=f"of the learning rate: {', '.join(SCHEDULES)} (default: by task, below)")
    add("--warmup", type=int, metavar="STEPS", help=f"steps of linear increase (default: {COMMON['warmup']})")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, help="length in passes over the data (default: by task, below)")
    length.add_argument("--steps", type=int, help="length in optimizer steps, instead of --epochs")
    add("--batch-size", type=int, metavar="N", help="examples per step (default: by task, below)")
    add("--seed", type=int, help=f"of initial weights, data order and sampled targets (default: {COMMON['seed']})")
    add("--threads", type=int, metavar="N", help=f"CPU threads of torch (default: {COMMON['threads']})")
    add("--device", choices=("cpu", "cuda"), help=f"where to train (default: {COMMON['device']})")
    add("--eval-every", type=int, metavar="STEPS", help="steps between evaluations (default: by task, below)")
    add(
        "--rest",
        type=name_or_none,
        metavar="NAME",
        help="give everything but the hidden weight matrices (output layer, embeddings, norms, biases) to a second "
        f"optimizer: {', '.join(REST)}, or none; holds for the compared ones too (default: none; Muon: AdamW)",
    )
    add("--rest-lr", type=float, metavar="LR", help=f"learning rate of --rest (default: {COMMON['rest_lr']:g})")


def add_output_options(group: argparse._ArgumentGroup) -> None:
    """Add the options about files and the display."""
    add = group.add_argument
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"of logs, checkpoints, plot.png and summary.html (default: a new {RUNS}/TASK-NAME-N)",
    )
    resume = "continue an interrupted run: the same command with --resume (without --out: the latest default folder)"
    add("--resume", action="store_true", default=False, help=resume)
    add("--overwrite", action="store_true", default=False, help="replace the runs in --out")
    every = "steps between checkpoints; one is also written on Ctrl-C and SIGTERM (default: 100)"
    add("--checkpoint-every", type=int, default=100, metavar="STEPS", help=every)
    target = "held-out accuracy (curves: loss) that the closing table reports the time to (default: by task)"
    add("--target", type=float, metavar="X", help=target)
    add("--quiet", action="store_true", default=False, help="no progress bar")


def name_or_none(text: str) -> str | None:
    """Parse a name, with "none" for None."""
    return None if text.lower() == "none" else text


def assignment(text: str) -> tuple[str, Any]:
    """Parse ``KEY=VALUE``; a value that is no Python literal is a word."""
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value
