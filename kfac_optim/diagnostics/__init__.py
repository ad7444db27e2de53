"""Read-only views of the curvature: coverage table, spectra, memory, stage times, pictures.

Where to look::

    report.py     the table, spectra, flattened reports
    memory.py     bytes
    profile.py    time per stage
    plots.py      pictures
"""

from ..spectra import eigenvalues
from .memory import memory_of, total
from .plots import plot_assignment, plot_history, plot_profile, plot_spectrum
from .profile import StageTimes, communicating
from .report import (
    Row,
    cosine,
    damped_condition,
    flatten,
    human_bytes,
    rank_list,
    report_of,
    row_of,
    spectrum,
    table,
    workers_of,
)

__all__ = [
    "Row",
    "StageTimes",
    "communicating",
    "cosine",
    "damped_condition",
    "eigenvalues",
    "flatten",
    "human_bytes",
    "memory_of",
    "plot_assignment",
    "plot_history",
    "plot_profile",
    "plot_spectrum",
    "rank_list",
    "report_of",
    "row_of",
    "spectrum",
    "table",
    "total",
    "workers_of",
]
