"""See ``__main__``: ``python -m benchmarks.paper``."""
