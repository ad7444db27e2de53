"""``python -m benchmarks.gpu``: see ``__main__``."""
