"""What goes wrong with data."""


class DataError(ValueError):
    """Data that cannot be used; the message names file, column and row, and says what to do."""
