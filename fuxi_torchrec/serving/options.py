"""How an export is served."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuxi_torchrec.export.options import Verify
from fuxi_torchrec.options import check_bounds, option

Search = Literal["index", "exact"]


@dataclass(frozen=True)
class RecommenderOptions:
    """How an export is opened."""

    log_dir: Path | None = option(None, "the store of appended events; the export's path and .log by default")
    verify: Verify = option("checksums", "what of the export's files is checked before they are first used")
    cache_mib: int = option(512, "memory for states of recent users; others are read or encoded again", least=0)
    search: Search = option("index", "use the export's FAISS index if it has one, or score every item")
    max_recent_events: int = option(
        5_000_000,  # 1 to 2.5 GB
        "events since the export that are held in memory; beyond it, appending is refused until a refresh",
        least=1,
    )

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class Limits:
    """What a request may ask for, and how many may wait; what waits beyond a limit is refused with 503."""

    max_k: int = option(1000, "items of an answer", least=1)
    max_body_kib: int = option(1024, "size of a request", least=1)
    max_events: int = option(10_000, "events of a request, appended or of a history", least=1)
    max_batch: int = option(64, "requests worked on together", least=1)
    max_batch_events: int = option(10_000, "events appended together, unless one request has more", least=1)
    batch_window_ms: float = option(2.0, "how long a request waits for others", least=0)
    max_waiting: int = option(4096, "requests of a kind that may wait", least=1)
    max_waiting_events: int = option(100_000, "events that may wait with them, or users to forget", least=1)

    def __post_init__(self) -> None:
        check_bounds(self)
