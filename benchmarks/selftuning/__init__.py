"""``python -m benchmarks.selftuning``: KFAC, which has no learning rate, on large and small batches."""
