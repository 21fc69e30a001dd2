"""Whether a day's model may take the place of the published one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.daily.config import GateConfig
from pipelines.daily.state import StageError


@dataclass(frozen=True)
class Verdict:
    """Whether a day's model is published, and why."""

    publish: bool
    reason: str


def judge(
    config: GateConfig, new: Mapping[str, Any], old: Mapping[str, Any] | None, published: str | None = None
) -> Verdict:
    """Compare a model with the published one.

    Args:
        config: how far it may fall.
        new: its evaluation.
        old: the published one's; None if nothing is published.
        published: the published day, for the message.
    """
    value = metric_of(config, new)
    name = f"{config.metric} (asked at the {config.request_time} time)".replace("last time", "last event's time")
    name = name.replace("target time", "target's time")
    if config.floor is not None and not value >= config.floor:
        return Verdict(False, f"{name} is {value:.4f}, below the floor {config.floor:g}")
    if old is None:
        return Verdict(value == value, f"{name} is {value:.4f}, nothing was published before")
    for key in ("split", "filter_seen"):
        if new.get(key) != old.get(key):
            raise StageError(
                f"day {published} was measured with {key} = {old.get(key)}, this one with {new.get(key)}: they do not "
                f"compare. Put evaluate.{key} back, or compare on the same data (gate.against=same_data), and run again"
            )
    before = metric_of(config, old)
    change = (value - before) / before if before else 0.0
    text = f"{name} is {value:.4f}, {before:.4f} for day {published}: {change:+.1%}"
    if not value >= before * (1.0 - config.max_fall):
        return Verdict(False, f"{text}; it may fall by {config.max_fall:.1%}")
    return Verdict(True, text)


def metric_of(config: GateConfig, evaluation: Mapping[str, Any]) -> float:
    """The number that decides."""
    try:
        return float(evaluation[config.request_time][config.metric])
    except KeyError:
        there = evaluation.get(config.request_time, {})
        raise StageError(
            f"the evaluation has no {config.metric} for request time {config.request_time}: set gate.metric to one of "
            f"{', '.join(key for key in there if '@' in key or key == 'mrr') or 'another request time'}"
        ) from None


def without_details(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation as it is kept: no baselines, no buckets."""
    kept = {key: value for key, value in evaluation.items() if key != "baselines"}
    for name in ("last", "target"):
        if name in kept:
            kept[name] = {key: value for key, value in kept[name].items() if key != "by_history_length"}
    return kept
