"""What an export has."""

from dataclasses import dataclass
from typing import Literal

from fuxi_torchrec.options import check_bounds, option

Verify = Literal["checksums", "sizes"]  # of an export's files, before they are first used


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    Attributes:
        recall_users: whose searches are compared with exact search.
    """

    as_of: str | None = option(
        None,
        "when users are queried: a number in the data's time unit, or ISO such as 2024-05-01T12:00:00 (UTC); by "
        "default the latest event's time",
        metavar="T",
    )
    truncate: bool = option(False, "leave events after --as-of out; else such an --as-of is refused")
    state_min_events: int = option(2000, "users with fewer encoded events get no state", metavar="N", least=1)
    index: bool = option(True, "write a FAISS index")
    exact_items: int = option(200_000, "catalogues of more items get an HNSW index", metavar="N", least=0)
    quantize: Literal["int8"] | None = option(None, "write an int8 index too")
    programs: bool = option(True, "write portable programs")
    recall_users: int = 500

    def __post_init__(self) -> None:
        check_bounds(self)
