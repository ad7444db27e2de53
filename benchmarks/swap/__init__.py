"""``python -m benchmarks.swap``: see ``__main__``."""
