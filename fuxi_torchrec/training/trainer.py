"""The training job: from a configuration and a run directory to checkpoints and metrics."""

import contextlib
import dataclasses
import json
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.config import Config, DataConfig
from fuxi_torchrec.data.batches import BatchMaker, Items
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.errors import DataError
from fuxi_torchrec.data.loader import Loader
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.schedule import Plan, Position
from fuxi_torchrec.data.splits import ByTime, LeaveOneOut, Split
from fuxi_torchrec.data.vocabulary import Vocabulary
from fuxi_torchrec.distributed import World, failing_together
from fuxi_torchrec.embeddings.pipeline import ShardedModel, make_pipeline
from fuxi_torchrec.embeddings.sharding import check_shardable, describe, initialise, plan_to_json, shard
from fuxi_torchrec.embeddings.tables import Tables, tables_for
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint import (
    LATEST,
    About,
    CheckpointError,
    Checkpoints,
    Identity,
    Progress,
    state_of,
    write_atomically,
)
from fuxi_torchrec.training.feed import Feed, Step, StepMaker
from fuxi_torchrec.training.interruption import StopRequest, Watchdog
from fuxi_torchrec.training.model import SequenceModel
from fuxi_torchrec.training.optimizers import StepOptimizer, learning_rate_share
from fuxi_torchrec.training.progress import ProgressLine
from fuxi_torchrec.training.run_directory import PLAN, PREEMPTED, SUMMARY, KnownItems, RunDirectory, RunError
from fuxi_torchrec.training.saving import Saver
from fuxi_torchrec.training.validation import sample_users, validate

logger = get_logger(__name__)

DEFAULT_TOKENS = 16384


class TrainingError(RuntimeError):
    """Training cannot go on."""


def split_of(config: DataConfig) -> Split:
    """The split that a configuration asks for."""
    if config.split == "by_time":
        assert config.test_from is not None
        return ByTime(config.test_from, config.valid_from)
    return LeaveOneOut(config.fit_on_valid)


def plan_of(config: Config) -> Plan:
    """How a configuration makes batches."""
    batch = config.batch
    tokens = DEFAULT_TOKENS if batch.tokens is None and batch.users is None else batch.tokens
    return Plan(batch.max_length, batch.cut, tokens, batch.users, batch.streams, batch.shuffle_blocks, config.seed)


@dataclass(frozen=True)
class RunData:
    """A dataset as a run sees it."""

    dataset: Dataset
    maker: BatchMaker
    items: KnownItems
    tables: Tables

    @staticmethod
    def open(config: Config, directory: RunDirectory) -> "RunData":
        """Read what training needs to know of its dataset; the known items from the run directory if it has them."""
        if not config.data.path:
            raise DataError("data.path is not set: name the directory of a prepared dataset, data.path=DIR")
        dataset = Dataset.open(config.data.path)
        if dataset.info.time_unit != config.data.time_unit:
            raise DataError(
                f"{dataset.path}: times are in {dataset.info.time_unit}, the config says data.time_unit = "
                f"{config.data.time_unit}: set it, and model.temporal_periods in the same unit"
            )
        tables = tables_for(config.tables, config.model.dim, dataset.info)
        reader = Reader(dataset, [table.feature for table in tables.sides], config.data.on_bad_rows)
        split = split_of(config.data)
        everything = np.arange(dataset.info.items + 1) > 0
        if directory.has_items():
            items = directory.read_items()
            if len(items.known) != dataset.info.items + 1:
                raise RunError(
                    f"{directory.path}: the run knows a vocabulary of {len(items.known) - 1} items, {dataset.path} has "
                    f"{dataset.info.items}: take another --run-dir, and --init-from this one to start from its weights"
                )
        else:
            counts = BatchMaker(reader, split, Items(everything)).item_counts()
            items = KnownItems(everything & (counts >= config.data.min_item_events), counts)
        if not items.known.any():
            raise DataError(
                f"{dataset.path}: no item has {config.data.min_item_events} training events: nothing to train on"
            )
        maker = BatchMaker(reader, split, Items(items.known, config.data.oov_rate, config.seed))
        return RunData(dataset, maker, items, tables)

    def identity(self, config: Config) -> Identity:
        """What a checkpoint of this run belongs to."""
        return Identity(
            self.dataset.info.fingerprint,
            self.items.fingerprint,
            self.dataset.info.time_unit,
            self.dataset.info.items,
            str(config.model.fingerprint()),
        )


def check_device(config: Config, world: World) -> None:
    """Refuse what the device cannot do; the same on every process."""
    if config.train.precision == "bfloat16" and not (
        world.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ValueError(
            f"train.precision = bfloat16 needs a CUDA device that computes in it, this is {world.device}: take float32"
        )


class Trainer:
    """A run: made from its directory if it exists, from nothing or another run's weights otherwise.

    Args:
        config: what to train.
        directory: where the run lives.
        world: this process among its peers.
        init_from: another run directory whose weights to start from.
        stop: says when to save and leave.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        world: World,
        init_from: Path | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.world, self.directory = world, directory
        with failing_together("opening the run directory"):
            if world.rank == 0:
                directory.lock()
                directory.check_config(config)
        self.config = config
        with failing_together("opening the dataset"):
            check_device(config, world)
            self.data = RunData.open(config, directory)
            check_shardable(self.data.tables, config.optimizer, world.size)
            self.loader = Loader(
                self.data.maker,
                plan_of(config),
                world.rank,
                world.size,
                config.batch.max_tokens_per_rank,
                config.data.workers,
            )
        self.model, self.plan = self._build()
        self.optimizer = StepOptimizer(self.model, config.optimizer)
        self.checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep_last, world)
        self.saver = Saver(self.checkpoints, config.checkpoint.background)
        self.stop = stop or StopRequest()
        self.identity = self.data.identity(config)
        self.progress = self._restore(init_from)
        self._validated_at = -1
        self._saved_at = self.progress.step  # loaded from there
        self.pauses: list[float] = []  # of training, for each save
        with failing_together("writing down the run"):  # nothing was refused
            if world.rank == 0:
                directory.write_config(config)
                directory.clear_preempted()
                if not directory.has_items():
                    directory.write_items(Vocabulary.of(self.data.dataset), self.data.items)
        self.lengths = self.data.maker.train_lengths()

    def _build(self) -> tuple[ShardedModel, Any]:
        torch.manual_seed(self.config.seed)
        tables = self.data.tables
        model = SequenceModel(self.config, tables)
        sharded, plan = shard(model, tables, self.config.optimizer, self.world)
        initialise(sharded, self.config.tables.init_std, self.config.seed)
        logger.info("sharding plan\n%s", describe(plan, tables))
        with failing_together("writing the sharding plan"):
            if self.world.rank == 0:
                write_atomically(self.directory.path / PLAN, plan_to_json(plan, tables, self.world.size))
        return sharded, plan

    def _restore(self, init_from: Path | None) -> Progress:
        latest = self._agreed(self.checkpoints.find(LATEST))
        planned = self._planned_steps()
        if latest is None:
            if init_from is not None:
                self._start_from(init_from)
            self._forget_metrics_after(0)
            return Progress(total_steps=planned)
        info = self.checkpoints.read_info(latest)
        with failing_together("comparing the checkpoint with the run"):
            self.identity.check(info.identity, latest)
        self.checkpoints.load(latest, self.model, self.optimizer)
        self.optimizer.set_steps(info.progress.step)
        self._forget_metrics_after(info.progress.step)
        logger.info("resumed from %s, saved by %d processes", latest.name, info.world_size)
        return info.progress

    def _forget_metrics_after(self, step: int) -> None:
        with failing_together("cutting the metrics at the checkpoint"):
            if self.world.rank == 0:
                self.directory.forget_metrics_after(step)

    def _start_from(self, other: Path) -> None:
        """Another run's weights over this run's vocabulary, which may have more items."""
        checkpoints = Checkpoints(RunDirectory(other).checkpoints, 1, self.world)
        path = self._agreed(checkpoints.find("best") or checkpoints.find(LATEST))
        if path is None:
            raise TrainingError(f"--init-from {other}: no complete checkpoint there")
        info = checkpoints.read_info(path)
        with failing_together(f"comparing {other} with this run"):
            found, own = info.identity, self.identity
            if found.time_unit != own.time_unit:
                raise TrainingError(
                    f"--init-from {other}: its times are in {found.time_unit}, this run's in {own.time_unit}"
                )
            if found.encoder != own.encoder:
                raise TrainingError(f"--init-from {other}: its encoder has another configuration")
            if found.items > own.items:
                raise TrainingError(
                    f"--init-from {other}: it has {found.items} items and this run {own.items}: prepare the dataset "
                    "with --extend, so that old items keep their indices"
                )
            self._check_same_items(other, found.items)
        checkpoints.load(path, self.model, None, rows=found.items + 1)
        logger.info(
            "started from %s: %d items' rows taken over, %d new ones initialised",
            path,
            found.items,
            own.items - found.items,
        )

    def _check_same_items(self, other: Path, items: int) -> None:
        """The raw ids of the first indices must be the same."""
        theirs = Vocabulary.read(str(other / "items.parquet")).ids
        ours = Vocabulary.of(self.data.dataset).ids
        if not ours[:items].equals(theirs.cast(ours.type)):
            raise TrainingError(
                f"--init-from {other}: its items have other indices than this dataset's: prepare the dataset with "
                "--extend over that run's"
            )

    def _agreed(self, path: Path | None) -> Path | None:
        """What process 0 sees: shared file systems may show others an older state."""
        seen: list[Path | None] = [path]
        dist.broadcast_object_list(seen, 0)
        return seen[0]

    def _planned_steps(self) -> int:
        steps = self.loader.steps(0) * self.config.train.epochs
        return steps if self.config.train.max_steps is None else min(steps, self.config.train.max_steps)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train to the end; the summary."""
        config, began = self.config, time.monotonic()
        if self._finished():
            logger.info("nothing to do: the run is at step %d", self.progress.step)
            return self._summary(0.0, 0)
        feed = Feed(self._steps(), self.data.tables.needs_equal_bags)
        pipeline = make_pipeline(config.train.pipeline, self.model, self.optimizer, self.world.device)
        self.optimizer.current = lambda: feed.waiting[0]
        watch = _Watch(self)
        self.model.train()
        logger.info(
            "%d users, %d known items, about %d steps an epoch, busiest process %.2f times the mean",
            len(self.lengths),
            len(self.data.items.ids),
            self.loader.steps(0),
            self.loader.balance(0),
        )
        watchdog = Watchdog(config.distributed.timeout_seconds * 0.9)
        try:
            events = self._loop(pipeline, feed, watch, watchdog)
        finally:
            watchdog.stop()
        watch.close()
        return self._summary(time.monotonic() - began, events)

    def _loop(self, pipeline: Any, feed: Feed, watch: "_Watch", watchdog: Watchdog) -> int:
        """Steps, validations and saves, until the end or until asked to stop; the events trained."""
        events, stopped, every = 0, False, self.config.checkpoint.every_steps
        while not stopped:
            watchdog.moved()
            done = self._one_step(pipeline, feed)
            if done is None:
                break
            events += done.events
            self.progress = dataclasses.replace(self.progress, step=self.progress.step + 1, position=done.position)
            watch.step(done.loss, done.events)
            if done.save_failed:
                self.saver.wait()  # raises why
            if done.asked_to_stop:
                self._preempted()
                return events
            saved = False
            if self._validation_due():
                with _detached(pipeline):
                    stopped, saved = self._validate(watch)
            if not saved and every is not None and self.progress.step % every == 0:
                self.save()
        if self._validates() and self._validated_at != self.progress.step:
            with _detached(pipeline):
                self._validate(watch)
        self.save()
        self.saver.wait()
        return events

    def _preempted(self) -> None:
        """Asked to leave: save at this step, on all processes, and say so."""
        logger.warning("asked to stop: saving step %d and leaving", self.progress.step)
        self.save()
        self.saver.wait()
        if self.world.rank == 0:
            note = {"step": self.progress.step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            write_atomically(self.directory.path / PREEMPTED, json.dumps(note) + "\n")

    def _finished(self) -> bool:
        limit = self.config.train.max_steps
        return self.progress.position.epoch >= self.config.train.epochs or (
            limit is not None and self.progress.step >= limit
        )

    def _steps(self) -> Iterator[Step]:
        config = self.config
        maker = StepMaker(config.loss, self.data.items.counts, self.data.items.ids, self.data.tables, config.seed)
        steps = self.loader.converted(self.progress.position, config.train.epochs, maker)
        left = math.inf if config.train.max_steps is None else config.train.max_steps - self.progress.step
        number = 0
        while number < left:
            step: Step | None = None
            with failing_together("reading training data"):
                step = next(steps, None)
            if step is None:
                return
            yield step
            number += 1

    def _one_step(self, pipeline: Any, feed: Feed) -> "_Done | None":
        """Train all micro-batches of a step; None at the end of the data."""
        summed, events = 0.0, 0
        users: list[int] = []
        self.optimizer.share = learning_rate_share(self.config.optimizer, self.progress.step, self.progress.total_steps)
        # dropout follows from the step alone, so that a resumed run repeats it
        key = [self.config.seed, self.progress.step, self.world.rank]
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
        while True:
            try:
                output = pipeline.progress(feed)
            except StopIteration:
                return None
            about = feed.waiting.popleft()
            summed += float(output) * about.scale
            events += about.events
            users += about.users.tolist()
            if about.last:
                break
        # one exchange says how the step went, and whether any process wants or needs to stop
        mine = [summed / self.world.size, float(events), float(self.stop.requested), float(self.saver.failed)]
        totals = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(totals)
        loss, all_events, asked, failed = totals.tolist()
        if not math.isfinite(loss):
            self._stop_on_nan(loss, summed, users)
        return _Done(loss, int(all_events), about.end, asked > 0, failed > 0)

    def _stop_on_nan(self, loss: float, own: float, users: list[int]) -> None:
        path = self.directory.path / f"failed-step-{self.progress.step + 1}-rank-{self.world.rank}.json"
        write_atomically(path, json.dumps({"own_loss": str(own), "user_rows": users}) + "\n")
        with contextlib.suppress(CheckpointError):
            self.saver.wait()  # of a step before this one
        last = self.checkpoints.find(LATEST)
        raise TrainingError(
            f"the loss of step {self.progress.step + 1} is {loss}: training stops. The rows of the batch's users are "
            f"in {path.parent}/failed-step-{self.progress.step + 1}-rank-*.json; "
            f"{f'{last.name} is the last checkpoint' if last else 'there is no checkpoint yet'}. A lower "
            "optimizer.lr, optimizer.clip_norm or a warm-up usually helps: they need a new --run-dir, and --init-from "
            "this one keeps its weights"
        )

    def save(self, metrics: dict[str, float] | None = None, best: bool = False) -> None:
        """Write a checkpoint, or begin to: a collective."""
        config = strict_yaml.to_dict(self.config)
        about = About(self.progress, self.identity, config, metrics or {}, best)
        if self._saved_at == self.progress.step:  # the tensors are there: only what is said of them is new
            self.saver.wait()
            with failing_together("writing to a checkpoint"):
                if self.world.rank == 0 and metrics:
                    self.checkpoints.amend(about)
            return
        self.pauses.append(self.saver.save(state_of(self.model, self.optimizer), about))
        self._saved_at = self.progress.step

    # --- validation --------------------------------------------------------------------------------------------------

    def _validates(self) -> bool:
        data = self.config.data
        nothing_held_out = data.fit_on_valid if data.split == "leave_one_out" else data.valid_from is None
        return self.config.validation.every_epochs is not None and not nothing_held_out

    def _validation_due(self) -> bool:
        if not self._validates():
            return False
        period = max(1, round((self.config.validation.every_epochs or 1) * self.loader.steps(0)))
        return self.progress.step % period == 0

    def _validate(self, watch: "_Watch") -> tuple[bool, bool]:
        """Whether to stop, and whether a checkpoint was written."""
        wanted = self.config.validation
        metrics = self.validate()
        self._validated_at = self.progress.step
        value = metrics[wanted.metric]
        best = self.progress.best_metric is None or value > self.progress.best_metric
        if best:
            self.progress = dataclasses.replace(
                self.progress, best_metric=value, best_step=self.progress.step, validations_since_best=0
            )
        else:
            since = self.progress.validations_since_best + 1
            self.progress = dataclasses.replace(self.progress, validations_since_best=since)
        watch.validated(metrics)
        if best:
            self.save(metrics, best=True)
        stop = wanted.patience is not None and self.progress.validations_since_best >= wanted.patience
        if stop:
            logger.info(
                "stopping early: %s did not improve in %d validations; best %.4f at step %s",
                wanted.metric,
                self.progress.validations_since_best,
                self.progress.best_metric,
                self.progress.best_step,
            )
        return stop, best

    def validate(self) -> dict[str, float]:
        """Metrics of the validation targets of a fixed sample of users: a collective."""
        config = self.config
        users = sample_users(len(self.lengths), config.validation.users, config.seed)
        return validate(
            self.model,
            self.data.maker,
            self.data.tables,
            self.data.items.ids,
            config.loss.metric,
            users,
            self.lengths[users],
            "valid",
            config.batch.max_length,
            self.world,
            config.validation.filter_seen,
        )

    def _summary(self, seconds: float, events: int) -> dict[str, Any]:
        summary = {
            "step": self.progress.step,
            "epoch": self.progress.position.epoch,
            "seconds": round(seconds, 2),
            "events_per_second": round(events / seconds) if seconds else 0,
            "best_metric": self.progress.best_metric,
            "best_step": self.progress.best_step,
            "metric": self.config.validation.metric,
            "peak_memory_mb": peak_memory_mb(self.world.device),
            "longest_pause_of_a_save": round(max(self.pauses, default=0.0), 4),
            "preempted": (self.directory.path / PREEMPTED).exists(),
        }
        with failing_together("writing the summary"):
            if self.world.rank == 0:
                write_atomically(self.directory.path / SUMMARY, json.dumps(summary, indent=1) + "\n")
        return summary


@dataclass(frozen=True)
class _Done:
    """How a step went, over all processes."""

    loss: float
    events: int
    position: Position
    asked_to_stop: bool
    save_failed: bool


class _Watch:
    """What is said and written while training runs, on process 0."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.active = trainer.world.rank == 0
        self._line = ProgressLine(trainer.progress.total_steps) if self.active else None
        self._board: Any = None
        if self.active and trainer.config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(trainer.directory.tensorboard), purge_step=trainer.progress.step + 1)
        self._events, self._since = 0, time.monotonic()

    def step(self, loss: float, events: int) -> None:
        """A step was trained."""
        self._events += events
        trainer = self.trainer
        number = trainer.progress.step
        if number % trainer.config.logging.every_steps:
            return
        with failing_together("writing metrics"):
            if self.active:
                self._log_step(number, loss)

    def _log_step(self, number: int, loss: float) -> None:
        trainer = self.trainer
        now = time.monotonic()
        speed = self._events / max(1e-9, now - self._since)
        self._events, self._since = 0, now
        entry: dict[str, Any] = {
            "step": number,
            "loss": loss,
            "epoch": trainer.progress.position.epoch,
            "lr": trainer.config.optimizer.lr * trainer.optimizer.share,
            "events_per_second": round(speed),
            "memory_mb": peak_memory_mb(trainer.world.device),
        }
        if trainer.optimizer.norm is not None:
            entry["gradient_norm"] = trainer.optimizer.norm
        trainer.directory.log(entry)
        self._draw("train", entry, number)
        assert self._line is not None
        self._line.show(number, loss, speed, entry["memory_mb"], trainer.progress.position.epoch)

    def validated(self, metrics: dict[str, float]) -> None:
        """The validation targets were ranked."""
        self._since = time.monotonic()  # not training time
        self._events = 0
        number = self.trainer.progress.step
        with failing_together("writing metrics"):
            if self.active:
                self.trainer.directory.log({"step": number, "validation": metrics})
                self._draw("validation", metrics, number)
        shown = ("hr@10", "ndcg@10", "hr@50", "mrr")
        logger.info(
            "step %d: validation %s, %d users",
            number,
            ", ".join(f"{name} {metrics[name]:.4f}" for name in shown),
            metrics["users"],
        )

    def close(self) -> None:
        """At the end."""
        if self._line is not None:
            self._line.close()
        if self._board is not None:
            self._board.close()

    def _draw(self, group: str, values: dict[str, Any], step: int) -> None:
        if self._board is not None:
            for name, value in values.items():
                if name not in ("step", "epoch"):
                    self._board.add_scalar(f"{group}/{name.replace('@', '_at_')}", value, step)


@contextmanager
def _detached(pipeline: Any) -> Iterator[None]:
    """The model without what a pipeline put around its lookups; the pipeline's next step puts it back."""
    if hasattr(pipeline, "detach"):
        pipeline.detach()
    yield


def peak_memory_mb(device: torch.device) -> int:
    """Most memory this process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
