"""What is evaluated or exported, and how it is measured."""

from dataclasses import dataclass
from typing import Literal

from fuxi_torchrec.options import check_bounds, option


@dataclass(frozen=True)
class RunOptions:
    """Which weights of a run, and on which data."""

    checkpoint: str | None = option(
        None, "by default the best one if there is one, else the latest", metavar="best|latest|STEP"
    )
    data: str | None = option(None, "the dataset, where it is not at the run's data.path", metavar="DIR")
    allow_other_data: bool = option(
        False, "take a dataset of another fingerprint; its items are found by their raw ids, unknown ones counted"
    )


@dataclass(frozen=True)
class EvaluateOptions:
    """Which targets are ranked, and how."""

    split: Literal["test", "valid"] = option("test", "which targets")
    request_time: Literal["target", "last"] | None = option(
        None, "query at the target's time, or at the last event's, as in serving; both by default"
    )
    filter_seen: bool = option(False, "leave items of the user's own history out")
    users: int | None = option(None, "a fixed sample of so many users; all by default", metavar="N", least=1)
    targets: Literal["all", "cold"] = option(
        "all", "cold: of each user the first item of the period that has no event in training; needs item features"
    )
    candidates: Literal["all", "cold"] = option("all", "cold: rank such items alone")
    baselines: bool = option(True, "measure simple baselines beside the model")

    def __post_init__(self) -> None:
        check_bounds(self)
