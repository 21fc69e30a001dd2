"""The loop, its data and optimizers, the run directory, checkpoints."""
