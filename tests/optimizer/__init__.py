"""The optimizers as users meet them: arguments, parameter groups, steps, precision, read-only views."""
