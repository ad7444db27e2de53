"""``python -m benchmarks.train``: see ``__main__``."""
