"""Every key of the daily pipeline's configuration.

python -m pipelines.daily.config                      # all keys with their defaults
python -m pipelines.daily.config FILE key=value ...   # the same, resolved
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fuxi_torchrec import strict_yaml
from pipelines.components import IMAGE

DAY = "{day}"


def _key(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class LogsConfig:
    """Where a day's events are."""

    path: str = _key("logs/{day}", "file, directory or glob with the log of one day")
    user_column: str = _key("user_id", "name of the column")
    item_column: str = _key("item_id", "name of the column")
    time_column: str = _key("timestamp", "name of the column")
    time_unit: Literal["s", "ms", "us"] = _key("s", "of the log; the training config's data.time_unit is the same")
    first_day: str | None = _key(None, "earlier days are history and no days of their own; null: the first log")
    min_new_events: int = _key(1, "a training day that brings fewer events is broken; 0 does not count them")
    arguments: tuple[str, ...] = _key((), "more for pipelines.prepare events, for example [--event-features, action]")

    def __post_init__(self) -> None:
        if self.path.count(DAY) != 1:
            raise ValueError(f"path must have {DAY} in it once, where the day's name stands, not {self.path!r}")
        head, tail = self.path.split(DAY)
        if any(sign in head + tail.partition("/")[0] for sign in "*?["):
            raise ValueError(f"path may have wildcards only after the part with {DAY}, as in logs/{DAY}/*.parquet")
        if self.min_new_events < 0:
            raise ValueError(f"min_new_events must not be negative, but is {self.min_new_events}")


@dataclass(frozen=True)
class TrainStageConfig:
    """How a day's model is trained."""

    config: str = _key("configs/demo.yaml", "experiment of pipelines.train, as the jobs see it")
    settings: tuple[str, ...] = _key((), "key=value settings that override the experiment's")
    first_settings: tuple[str, ...] = _key((), "more of them, for a run that starts from nothing")
    warm_start: bool = _key(True, "start from the published run's weights")
    every_days: int = _key(1, "train on every n-th day; on the others the published export takes the new events")

    def __post_init__(self) -> None:
        if self.every_days < 1:
            raise ValueError(f"every_days must be at least 1, not {self.every_days}")


@dataclass(frozen=True)
class EvaluateStageConfig:
    """How a day's model is measured."""

    split: Literal["test", "valid"] = _key("test", "which targets")
    users: int | None = _key(None, "a fixed sample of so many users; null takes all")
    baselines: bool = _key(True, "measure simple baselines beside it")
    filter_seen: bool = _key(False, "leave items of the user's own history out")

    def __post_init__(self) -> None:
        if self.users is not None and self.users < 1:
            raise ValueError(f"users must be at least 1, not {self.users}")


@dataclass(frozen=True)
class GateConfig:
    """When a day's model is published."""

    metric: str = _key("ndcg@10", "as the evaluation names it")
    request_time: Literal["last", "target"] = _key("last", "when the model is queried; last is as in serving")
    max_fall: float = _key(0.05, "publish unless the metric is lower by more than this share of the published one's")
    floor: float | None = _key(None, "and never below this value")
    against: Literal["recorded", "same_data"] = _key(
        "recorded", "the published run's value on its own day, or measured anew on this day's data"
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_fall <= 1.0:
            raise ValueError(f"max_fall is a share between 0 and 1, not {self.max_fall}")


@dataclass(frozen=True)
class ExportStageConfig:
    """How a day's model is exported."""

    arguments: tuple[str, ...] = _key((), "more for pipelines.export, for example [--quantize, int8]")


@dataclass(frozen=True)
class JobsConfig:
    """How TorchX runs the stages."""

    processes: str = _key("1x2", "nodes x ranks per node of training, evaluation and export")
    image: str = _key(IMAGE, "container image, for clusters")
    cpu: int = _key(2, "cores per node")
    gpu: int = _key(0, "GPUs per node")
    mem_mb: int = _key(8192, "memory per node in MB")
    host: str | None = _key(None, "named resource; replaces cpu, gpu and mem_mb")
    threads: int = _key(1, "OMP threads per rank")
    restarts: int = _key(3, "torchrun restarts all workers so often when one fails")
    relaunches: int = _key(3, "a preempted training job is launched again so often")
    timeout_minutes: float = _key(1440.0, "a job that takes longer is cancelled and has failed")
    poll_seconds: float = _key(2.0, "between looks at a job")
    environment: dict[str, str] = field(default_factory=dict, metadata={"help": "more variables of the jobs"})
    mounts: tuple[str, ...] = _key((), 'in TorchX\'s form: ["type=bind,src=/host,dst=/job"]')
    scheduler_options: dict[str, str] = field(
        default_factory=dict, metadata={"help": "of the scheduler, such as {partition: debug}"}
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(\d+:)?\d+x\d+", self.processes):
            raise ValueError(f"processes is nodes x ranks per node, such as 1x2 or 2x8, not {self.processes!r}")
        if not self.timeout_minutes > 0 or not self.poll_seconds > 0:
            raise ValueError("timeout_minutes and poll_seconds must be positive")
        if self.relaunches < 0 or self.restarts < 0:
            raise ValueError("relaunches and restarts must not be negative")


@dataclass(frozen=True)
class DailyConfig:
    """The daily pipeline."""

    root: str = _key("runs/daily", "everything is written below it, on storage that all jobs share")
    logs: LogsConfig = field(default_factory=LogsConfig)
    train: TrainStageConfig = field(default_factory=TrainStageConfig)
    evaluate: EvaluateStageConfig = field(default_factory=EvaluateStageConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    export: ExportStageConfig = field(default_factory=ExportStageConfig)
    jobs: JobsConfig = field(default_factory=JobsConfig)


def load(path: str | None = None, overrides: Sequence[str] = ()) -> DailyConfig:
    """Read a configuration: defaults, then the file, then ``key.sub=value`` overrides.

    Example:
        >>> load(overrides=["gate.max_fall=0.1"]).gate.max_fall
        0.1
    """
    return strict_yaml.load(DailyConfig, path, overrides)


if __name__ == "__main__":
    sys.exit(strict_yaml.print_main(DailyConfig, "python -m pipelines.daily.config"))
