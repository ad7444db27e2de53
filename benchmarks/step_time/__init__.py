"""``python -m benchmarks.step_time``: see ``__main__``."""
