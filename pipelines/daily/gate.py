"""Whether a day's model may take the place of the published one."""

from collections.abc import Mapping
from typing import Any

from pipelines.daily.config import GateConfig
from pipelines.daily.state import StageError

_TIMES = {"last": "the last event's time", "target": "the target's time"}


def judge(
    config: GateConfig, new: Mapping[str, Any], old: Mapping[str, Any] | None, published: str | None = None
) -> tuple[bool, str]:
    """Whether a model is published, and why, by its evaluation and that of the published day, if there is one."""
    value = _metric(config, new)
    text = f"{config.metric} (queried at {_TIMES[config.request_time]}) is {value:.4f}"
    if config.floor is not None and not value >= config.floor:
        return False, f"{text}, below the floor {config.floor:g}"
    if old is None:
        return value == value, f"{text}, nothing was published before"
    for key in ("split", "filter_seen"):
        if new.get(key) != old.get(key):
            raise StageError(
                f"day {published} was measured with {key} = {old.get(key)}, this one with {new.get(key)}: they do not "
                f"compare. Put evaluate.{key} back, or compare on the same data (gate.against=same_data), and run again"
            )
    before = _metric(config, old)
    change = (value - before) / before if before else 0.0
    text = f"{text}, {before:.4f} for day {published}: {change:+.1%}"
    if not value >= before * (1.0 - config.max_fall):
        return False, f"{text}; it may fall by {config.max_fall:.1%}"
    return True, text


def _metric(config: GateConfig, evaluation: Mapping[str, Any]) -> float:
    found = evaluation.get(config.request_time, {})
    if config.metric not in found:
        known = ", ".join(key for key in found if "@" in key or key == "mrr")
        raise StageError(
            f"the evaluation has no {config.metric} for request time {config.request_time}: set gate.metric to one of "
            f"{known or 'another request time'}"
        )
    return float(found[config.metric])
