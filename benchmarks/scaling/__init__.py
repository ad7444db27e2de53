"""``python -m benchmarks.scaling``: see ``__main__``."""
