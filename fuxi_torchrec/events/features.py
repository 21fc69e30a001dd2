"""Features of events."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SideTable:
    """A side feature of events: its rows are added to the item's."""

    name: str
    multiple: bool
    pooling: Literal["sum", "mean"]
