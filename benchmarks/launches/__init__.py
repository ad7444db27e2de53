"""``python -m benchmarks.launches``: see ``__main__``."""
