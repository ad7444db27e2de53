"""``python -m benchmarks.paper``: see ``__main__``."""
