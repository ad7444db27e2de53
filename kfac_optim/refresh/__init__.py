"""Refreshes: when factors are decomposed, by which rank, over how many steps.

Where to look::

    refresher.py        when a refresh begins, and what becomes of it
    jobs.py             one refresh in progress: its jobs, step by step
    pacing.py           what a refresh costs, and how long to wait for the next
"""

from .refresher import Refresher

__all__ = ["Refresher"]
