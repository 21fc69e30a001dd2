"""Every configuration key, in one place.

    python -m fuxi_torchrec.config                      # all keys with their defaults
    python -m fuxi_torchrec.config FILE key=value ...   # the same, resolved

Sections are frozen dataclasses; ``help`` in a field's metadata is the comment shown beside it.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.distributed import DEFAULT_TIMEOUT_SECONDS
from fuxi_torchrec.encoders.base import EncoderConfig, setting
from fuxi_torchrec.encoders.registry import DEFAULT_KIND, config_class
from fuxi_torchrec.events.features import OWNERS, Owner
from fuxi_torchrec.events.times import parse_time
from fuxi_torchrec.options import check_bounds
from fuxi_torchrec.tasks.next_item import LossConfig
from fuxi_torchrec.tasks.registry import TaskConfig


def _operational(default: Any, help: str, **bounds: Any) -> Any:
    """A setting that may change when a run is resumed; all others are the run's identity."""
    return setting(default, help, operational=True, **bounds)


class _Section:
    """The base of sections: bounds that stand in a setting are checked."""

    def __post_init__(self) -> None:
        check_bounds(self, named=str)


@dataclass(frozen=True)
class DataConfig(_Section):
    """What is trained on."""

    path: str = _operational("", "directory of a prepared dataset; its fingerprint is checked, not its place")
    time_unit: Literal["s", "ms", "us"] = setting("s", "of the dataset and of model.temporal_periods")
    split: Literal["leave_one_out", "by_time"] = setting("leave_one_out", "what is kept for validation and test")
    fit_on_valid: bool = setting(False, "leave_one_out: train on the validation events too, without validation")
    valid_from: int | str | None = setting(
        None, "by_time: start of the validation period, in the time unit or ISO (UTC): 2024-05-01T12:00:00"
    )
    test_from: int | str | None = setting(None, "by_time: start of the test period, likewise; required")
    min_item_events: int = setting(1, "items with fewer training events are unknown: index 0", least=1, most=2**40)
    oov_rate: float = setting(0.01, "share of input items replaced by index 0 in training, so that its row is trained")
    on_bad_rows: Literal["error", "skip"] = _operational("error", "bad users: stop, or leave them out and count them")
    num_workers: int = _operational(0, "processes that read ahead, per rank", least=0, most=2**10)
    cache_mib: int = _operational(
        512, "decoded blocks that a rank keeps; its reading processes share it", least=1, most=2**24
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("valid_from", "test_from"):
            if isinstance(value := getattr(self, name), str):  # from here on a number
                object.__setattr__(self, name, parse_time(value, self.time_unit))
        if self.split == "by_time" and self.test_from is None:
            raise ValueError("split by_time needs test_from, a time in the dataset's unit")
        if self.split == "leave_one_out" and (self.test_from is not None or self.valid_from is not None):
            raise ValueError("valid_from and test_from belong to split by_time")
        if self.split == "by_time" and self.fit_on_valid:
            raise ValueError("fit_on_valid belongs to split leave_one_out; by_time: leave valid_from out instead")
        if not 0.0 <= self.oov_rate < 1.0:
            raise ValueError(f"oov_rate must be at least 0 and below 1, not {self.oov_rate}")


@dataclass(frozen=True)
class BatchConfig(_Section):
    """How histories become steps; the same on any number of ranks."""

    events: int | None = setting(
        None, "input events of a global batch, about; 16384 if users is not given either", least=1, most=2**32
    )
    users: int | None = setting(None, "sequences of a global batch, in place of events", least=1, most=2**32)
    max_length: int = setting(1024, "input events of a sequence, at most", least=1, most=2**24)
    truncation: Literal["recent", "windows"] = setting("recent", "of longer histories: the last events, or windows")
    streams: int = setting(16, "the dataset is read in so many streams; at least as many as ranks", least=1, most=2**14)
    shuffle_blocks: int = setting(8, "row groups whose users are mixed with each other", least=1, most=2**32)
    max_events_per_rank: int | None = _operational(
        None,
        "gradient accumulation: a rank's share of a batch in parts of so many events (adamw); null: at once",
        least=1,
        most=2**32,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.events is not None and self.users is not None:
            raise ValueError("give events or users, not both")


Sharding = Literal["row_wise", "table_wise", "column_wise", "data_parallel", "auto"]


@dataclass(frozen=True)
class FeatureConfig:
    """The table of a feature's values."""

    pooling: Literal["sum", "mean"] = setting("sum", "of an event's values, where it has several")
    sharding: Sharding = _operational("data_parallel", "how the table is sharded; auto: TorchRec's planner chooses")


@dataclass(frozen=True)
class TablesConfig(_Section):
    """The embedding tables; their width is model.dim."""

    init_std: float = setting(0.02, "rows start normal with this deviation, within two of them", above=0)
    sharding: Sharding = _operational("row_wise", "how the item table is sharded; auto: TorchRec's planner chooses")


@dataclass(frozen=True)
class FeaturesConfig:
    """Features that the model reads beside items and times, by whose they are and by their names in the dataset."""

    event: dict[str, FeatureConfig] = field(
        default_factory=dict, metadata={"help": "features of events: {action: {pooling: mean}}"}
    )
    item: dict[str, FeatureConfig] = field(
        default_factory=dict, metadata={"help": "features of items, part of an item's row wherever it is: {brand: {}}"}
    )
    user: dict[str, FeatureConfig] = field(
        default_factory=dict, metadata={"help": "features of users, added to the query: {age: {}}"}
    )
    id_dropout: float = setting(
        0.1, "share of items that a step sees by their features alone, where there are any: trains for new items"
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.id_dropout < 1.0:
            raise ValueError(f"id_dropout must be at least 0 and below 1, not {self.id_dropout}")

    def of(self, owner: Owner) -> dict[str, FeatureConfig]:
        """Of one owner, by name."""
        found: dict[str, FeatureConfig] = getattr(self, owner)
        return found

    def with_sharding(self, sharding: Sharding) -> "FeaturesConfig":
        """The same, all tables sharded in one way."""
        return dataclasses.replace(
            self,
            **{
                owner: {name: dataclasses.replace(each, sharding=sharding) for name, each in self.of(owner).items()}
                for owner in OWNERS
            },  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class OptimizerConfig(_Section):
    """How parameters move."""

    kind: Literal["adamw", "rowwise_adagrad"] = setting(
        "adamw", "for everything; rowwise_adagrad updates tables in the backward pass, AdamW the rest"
    )
    lr: float = setting(1e-3, "learning rate", above=0)
    table_lr: float | None = setting(None, "learning rate of the tables; lr if null", above=0)
    scalar_lr: float | None = setting(None, "learning rate of decays and channel weights; lr if null", above=0)
    betas: tuple[float, float] = setting((0.9, 0.98), "decay rates of AdamW's moments")
    eps: float = setting(1e-8, "AdamW's and Adagrad's", above=0)
    weight_decay: float = setting(0.0, "decoupled, on the encoder's matrices; never on tables", least=0)
    clip_norm: float | None = setting(None, "largest norm of all gradients together; null does not clip", above=0)
    warmup_steps: int = setting(0, "the learning rates rise linearly over so many steps", least=0, most=2**48)
    lr_schedule: Literal["constant", "linear", "cosine"] = setting("constant", "how they decay afterwards")
    decay_steps: int | None = setting(
        None, "until this step; null: the end of training as planned at the first start", least=1, most=2**48
    )
    min_lr_factor: float = setting(0.0, "factor of the learning rate left at the end of the schedule")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {list(self.betas)}")
        if not 0.0 <= self.min_lr_factor <= 1.0:
            raise ValueError(f"min_lr_factor is a share between 0 and 1, not {self.min_lr_factor}")
        if self.kind == "rowwise_adagrad" and self.clip_norm is not None:
            raise ValueError(
                "clip_norm needs all gradients before the update, rowwise_adagrad updates tables in the backward "
                "pass: take kind adamw, or leave clip_norm out"
            )


@dataclass(frozen=True)
class TrainConfig(_Section):
    """How long, and how a step is computed."""

    epochs: int = _operational(10, "passes over the data, at most", least=1, most=2**24)
    max_steps: int | None = _operational(None, "steps, at most", least=1, most=2**48)
    precision: Literal["float32", "bfloat16"] = setting("float32", "bfloat16 is autocast, on devices that have it")
    pipeline: Literal["auto", "base", "sparse_dist"] = _operational(
        "auto", "TorchRec's training pipeline; auto overlaps the lookup (sparse_dist) on CUDA"
    )


@dataclass(frozen=True)
class ValidationConfig(_Section):
    """Exact ranks of the validation targets, in mid-training."""

    every_epochs: float | None = _operational(1.0, "how often, 0.5 is twice an epoch; null never", above=0)
    users: int | None = _operational(2000, "a fixed sample of so many; null takes all", least=1, most=2**40)
    metric: Literal["hr@10", "ndcg@10", "hr@50", "ndcg@50", "mrr"] = _operational("ndcg@10", "decides what is best")
    patience: int | None = _operational(
        None, "stop after so many validations without a better one; null never", least=1, most=2**40
    )
    filter_seen: bool = _operational(False, "leave items of the user's own history out of the candidates")


@dataclass(frozen=True)
class CheckpointConfig(_Section):
    """What is kept on disk."""

    every_steps: int | None = _operational(500, "also at the end of training; null: only then", least=1, most=2**48)
    keep_last: int = _operational(2, "older ones are removed, the best one stays", least=1, most=2**24)
    async_save: bool = _operational(True, "copy, go on training, and write meanwhile")


@dataclass(frozen=True)
class DistributedConfig(_Section):
    """How ranks find and wait for each other."""

    device: Literal["auto", "cpu", "cuda"] = _operational("auto", "auto takes CUDA where there is one")
    timeout_seconds: float = _operational(
        DEFAULT_TIMEOUT_SECONDS, "a collective that waits longer for a peer is an error", above=0, most=10**7
    )


@dataclass(frozen=True)
class LoggingConfig(_Section):
    """What is said while a job runs."""

    level: Literal["debug", "info", "warning", "error"] = _operational("info", "least severe message shown")
    every_steps: int = _operational(10, "a line, and an object in metrics.jsonl", least=1, most=2**48)
    tensorboard: bool = _operational(True, "write TensorBoard events too")


@dataclass(frozen=True)
class Config:
    """A whole experiment.

    Example:
        >>> dataclasses.replace(Config(), seed=7).model.kind
        'fuxi_linear'
    """

    seed: int = setting(0, "everything random follows from it")
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    model: EncoderConfig = field(default_factory=config_class(DEFAULT_KIND), metadata={"by_kind": config_class})
    tables: TablesConfig = field(default_factory=TablesConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be at least 0 and below 2^63, not {self.seed}")
        if self.optimizer.kind == "rowwise_adagrad":
            if self.batch.max_events_per_rank is not None:
                raise ValueError(
                    "batch.max_events_per_rank accumulates gradients over parts of a batch, and optimizer.kind "
                    "rowwise_adagrad updates the tables in every backward pass: lower batch.events, or take adamw"
                )
            shardings = {"tables": self.tables.sharding}
            for owner in OWNERS:
                features = self.features.of(owner).items()
                shardings |= {f"features.{owner}.{name}": each.sharding for name, each in features}
            for key, sharding in shardings.items():
                if sharding == "column_wise":
                    raise ValueError(
                        f"{key}.sharding is column_wise and optimizer.kind rowwise_adagrad: every column shard would "
                        "have its own accumulator, and the result would depend on their number; take another "
                        "sharding, or adamw"
                    )


class Difference(NamedTuple):
    """A key that differs, and whether a resumed run may change it."""

    key: str
    old: Any
    new: Any
    operational: bool


def differences(old: Any, new: Any, prefix: str = "") -> list[Difference]:
    """The keys in which two configurations differ.

    Example:
        >>> old, new = load_config(), load_config(overrides=["seed=7", "train.epochs=3"])
        >>> [(d.key, d.old, d.new, d.operational) for d in differences(old, new)]
        [('seed', 0, 7, False), ('train.epochs', 10, 3, True)]
    """
    found: list[Difference] = []
    for each in dataclasses.fields(old):
        if not hasattr(new, each.name):  # sections of different kinds: the kind says it
            continue
        key, a, b = prefix + each.name, getattr(old, each.name), getattr(new, each.name)
        if dataclasses.is_dataclass(a):
            found += differences(a, b, key + ".")
        elif isinstance(a, dict) and a.keys() == b.keys():
            for name in a:
                found += differences(a[name], b[name], f"{key}.{name}.")
        elif a != b:
            found.append(Difference(key, a, b, bool(each.metadata.get("operational"))))
    return found


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read an experiment: defaults, then the file, then ``key.sub=value`` overrides.

    Example:
        >>> load_config(overrides=["seed=7", "logging.level=debug"]).logging.level
        'debug'
        >>> load_config(overrides=["logging.levle=debug"])
        Traceback (most recent call last):
        ...
        fuxi_torchrec.strict_yaml.ConfigError: command line: unknown key logging.levle; did you mean logging.level?
    """
    return strict_yaml.load(Config, path, overrides)


if __name__ == "__main__":
    sys.exit(strict_yaml.print_main(Config, "python -m fuxi_torchrec.config"))
