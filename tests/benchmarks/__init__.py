"""The benchmarks at small scale."""
