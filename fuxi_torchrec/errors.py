"""The ancestor of every error that this package raises on purpose: its message says what is wrong and what to do."""


class FuxiError(Exception):
    """Something cannot be done as asked; each box has a class of its own below this one."""
