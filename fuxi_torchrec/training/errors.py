"""What ends a training run."""


class TrainingError(RuntimeError):
    """Training cannot go on."""
