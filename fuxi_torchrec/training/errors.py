"""What ends a training run."""

from fuxi_torchrec.errors import FuxiError


class TrainingError(FuxiError, RuntimeError):
    """Training cannot go on."""
