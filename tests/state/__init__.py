"""Checkpoints, copies, and what is left after an interruption."""
