"""See ``__main__``: ``python -m benchmarks.step_time``."""
