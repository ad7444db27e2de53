"""Read-only views of the curvature. Users reach most of them through ``optimizer.curvature``.

Where to look::

    report.py     which layer is treated how (the table of ``print(engine)``), spectra, condition numbers, workers;
                  flatten() for loggers
    memory.py     how many bytes the curvature takes, by kind
    plots.py      pictures of these: plot_spectrum, plot_history, plot_profile, plot_assignment
"""

from .memory import memory_estimate
from .plots import plot_assignment, plot_history, plot_profile, plot_spectrum
from .report import flatten, human_bytes, spectrum

__all__ = [
    "flatten",
    "human_bytes",
    "memory_estimate",
    "plot_assignment",
    "plot_history",
    "plot_profile",
    "plot_spectrum",
    "spectrum",
]
