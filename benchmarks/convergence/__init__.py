"""``python -m benchmarks.convergence``: see ``__main__``."""
