"""Every key of the daily pipeline's configuration.

python -m pipelines.daily.config                      # all keys with their defaults
python -m pipelines.daily.config FILE key=value ...   # the same, resolved
"""

import re
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from fuxi_torchrec import strict_yaml
from pipelines.components import IMAGE

DAY = "{day}"


def _key(default: Any, help: str) -> Any:
    metadata = {"help": help}
    return (
        field(default_factory=dict, metadata=metadata) if default == {} else field(default=default, metadata=metadata)
    )


@dataclass(frozen=True)
class LogsConfig:
    """Where a day's events are."""

    path: str = _key("logs/{day}", "file, directory or glob with the log of one day")
    user_column: str = _key("user_id", "name of the column")
    item_column: str = _key("item_id", "name of the column")
    time_column: str = _key("timestamp", "name of the column")
    time_unit: Literal["s", "ms", "us"] = _key("s", "of the log; the training config's data.time_unit is the same")
    first_day: str | None = _key(None, "earlier days are history and no days of their own; null: the first log")
    min_new_events: Annotated[int, Field(ge=0)] = _key(
        1, "a training day that brings fewer events is broken; 0 does not count them"
    )
    arguments: tuple[str, ...] = _key((), "more for pipelines.prepare events, for example [--event-features, action]")

    def __post_init__(self) -> None:
        if self.path.count(DAY) != 1:
            raise ValueError(f"path must have {DAY} in it once, where the day's name stands, not {self.path!r}")
        head, tail = self.path.split(DAY)
        if any(sign in head + tail.partition("/")[0] for sign in "*?["):
            raise ValueError(f"path may have wildcards only after the part with {DAY}, as in logs/{DAY}/*.parquet")


@dataclass(frozen=True)
class TrainStageConfig:
    """How a day's model is trained."""

    config: str = _key("configs/demo.yaml", "experiment of pipelines.train, as the jobs see it")
    settings: tuple[str, ...] = _key((), "key=value settings that override the experiment's")
    first_settings: tuple[str, ...] = _key((), "more of them, for a run that starts from nothing")
    warm_start: bool = _key(True, "start from the published run's weights")
    every_days: Annotated[int, Field(ge=1)] = _key(
        1, "train on every n-th day; on the others the published export takes the new events"
    )


@dataclass(frozen=True)
class EvaluateStageConfig:
    """How a day's model is measured."""

    split: Literal["test", "valid"] = _key("test", "which targets")
    users: Annotated[int, Field(ge=1)] | None = _key(None, "a fixed sample of so many users; null takes all")
    baselines: bool = _key(True, "measure simple baselines beside it")
    filter_seen: bool = _key(False, "leave items of the user's own history out")


@dataclass(frozen=True)
class GateConfig:
    """When a day's model is published."""

    metric: str = _key("ndcg@10", "as the evaluation names it")
    request_time: Literal["last", "target"] = _key("last", "when the model is queried; last is as in serving")
    max_fall: Annotated[float, Field(ge=0, le=1)] = _key(
        0.05, "publish unless the metric is lower by more than this share of the published one's"
    )
    floor: float | None = _key(None, "and never below this value")
    against: Literal["recorded", "same_data"] = _key(
        "recorded", "the published run's value on its own day, or measured anew on this day's data"
    )


@dataclass(frozen=True)
class ExportStageConfig:
    """How a day's model is exported."""

    arguments: tuple[str, ...] = _key((), "more for pipelines.export, for example [--quantize, int8]")


@dataclass(frozen=True)
class JobsConfig:
    """How TorchX runs the stages."""

    ranks: str = _key("1x2", "nodes x ranks per node of training, evaluation and export")
    image: str = _key(IMAGE, "container image, for clusters")
    cpu: int = _key(2, "cores per node")
    gpu: int = _key(0, "GPUs per node")
    mem_mb: int = _key(8192, "memory per node in MB")
    host: str | None = _key(None, "named resource; replaces cpu, gpu and mem_mb")
    threads: int = _key(1, "OMP threads per rank")
    restarts: Annotated[int, Field(ge=0)] = _key(3, "torchrun restarts all workers so often when one fails")
    relaunches: Annotated[int, Field(ge=0)] = _key(3, "a preempted training job is launched again so often")
    poll_seconds: Annotated[float, Field(gt=0)] = _key(2.0, "between looks at a job")
    environment: dict[str, str] = field(default_factory=dict, metadata={"help": "more variables of the jobs"})
    mounts: tuple[str, ...] = _key((), 'in TorchX\'s form: ["type=bind,src=/host,dst=/job"]')
    scheduler_options: dict[str, str] = field(
        default_factory=dict, metadata={"help": "of the scheduler, such as {partition: debug}"}
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(\d+:)?\d+x\d+", self.ranks):
            raise ValueError(f"ranks is nodes x ranks per node, such as 1x2 or 2x8, not {self.ranks!r}")


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


if __name__ == "__main__":
    sys.exit(strict_yaml.print_main(DailyConfig, "python -m pipelines.daily.config"))
