"""Several processes: assignment, communication, wrappers, failures."""
