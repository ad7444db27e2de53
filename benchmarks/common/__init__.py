"""What all studies share: models, tasks, data, settings, optimizers, runs, tables and pictures."""
