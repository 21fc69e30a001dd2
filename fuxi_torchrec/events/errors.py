"""What goes wrong with events."""

from fuxi_torchrec.errors import FuxiError


class DataError(FuxiError, ValueError):
    """Data that cannot be used; the message names file, column and row, and says what to do."""
