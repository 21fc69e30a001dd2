"""One logger for the whole package, aware of ranks.

Library code calls ``get_logger(__name__)`` and nothing else; a program calls ``setup_logging`` once. Messages below
WARNING come from rank 0 only, warnings and errors from every rank, each with the rank that speaks.
"""

import logging
import os
import sys
import warnings
from typing import TextIO

ROOT_NAME = "fuxi_torchrec"
LEVELS = ("debug", "info", "warning", "error")


def get_logger(name: str = ROOT_NAME) -> logging.Logger:
    """The logger of a module: below ``fuxi_torchrec``, whatever the module's own top package is.

    Example:
        >>> get_logger("pipelines.train").name
        'fuxi_torchrec.pipelines.train'
    """
    if name != ROOT_NAME and not name.startswith(ROOT_NAME + "."):
        name = f"{ROOT_NAME}.{name}"
    return logging.getLogger(name)


def setup_logging(level: str = "info", stream: TextIO | None = None) -> logging.Logger:
    """Send the package's messages to ``stream`` (default: standard error) in one format; safe to call again.

    Rank and world size are torchrun's RANK and WORLD_SIZE; outside torchrun there is one rank.
    """
    if level not in LEVELS:
        raise ValueError(f"logging level must be one of {', '.join(LEVELS)}, not {level!r}")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_Short(f"rank {rank}/{world_size}: " if world_size > 1 else "", level == "debug"))
    if rank != 0:
        handler.setLevel(logging.WARNING)
    logger = get_logger()
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    _quiet_libraries()
    return logger


class _Short(logging.Formatter):
    """Time and message; what is no news has its level and rank too, and when details are wanted, its module."""

    def __init__(self, who: str, detailed: bool) -> None:
        self.who, self.detailed = who, detailed
        super().__init__("%(asctime)s %(message)s", "%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        loud = f"{record.levelname} {self.who}" if self.detailed or record.levelno != logging.INFO else ""
        module = f"{record.name}: " if self.detailed else ""
        return f"{record.asctime} {loud}{module}{record.message}"


def _quiet_libraries() -> None:
    """Leave out what TorchRec and torch say of their own affairs at every start."""
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().addFilter(_about_own_code)
    for module in ("torch", "torchrec"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{module}\.")
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")


def _about_own_code(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Sharding spec not found")
