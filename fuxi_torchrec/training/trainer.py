"""The training job: from a configuration and a run directory to checkpoints and metrics."""

import contextlib
import dataclasses
import json
import math
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
from fuxi_torchrec.artifacts import write_atomically
from fuxi_torchrec.config import Config
from fuxi_torchrec.data.loader import Loader
from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.distributed import World, broadcast_from_rank_0, check_same, raise_on_all_ranks
from fuxi_torchrec.embeddings.pipeline import ShardedModel, make_pipeline
from fuxi_torchrec.embeddings.sharding import (
    check_shardable,
    describe,
    initialise,
    local_parts,
    plan_to_json,
    shard,
)
from fuxi_torchrec.embeddings.tables import table_of
from fuxi_torchrec.evaluation.validation import validate
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint.info import LATEST, CheckpointError, Progress, named
from fuxi_torchrec.training.checkpoint.saver import Saver
from fuxi_torchrec.training.checkpoint.store import About, Checkpoints, state_of
from fuxi_torchrec.training.errors import TrainingError
from fuxi_torchrec.training.feed import Feed, Step, StepMaker
from fuxi_torchrec.training.interruption import StopRequest, Watchdog
from fuxi_torchrec.training.metrics_logger import MetricsLogger, peak_memory_mb
from fuxi_torchrec.training.model import SequenceModel
from fuxi_torchrec.training.optimizers import StepOptimizer, learning_rate_share
from fuxi_torchrec.training.run_data import RunData, plan_of, remarks
from fuxi_torchrec.training.run_directory import PLAN, PREEMPTED, SUMMARY, RunDirectory
from fuxi_torchrec.training.validation_plan import ValidationPlan
from fuxi_torchrec.training.warm_start import warm_start

logger = get_logger(__name__)

_AT_ONCE = 2**22  # numbers that are looked at together


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
        check_same("the configuration", strict_yaml.dump(config))
        with raise_on_all_ranks("opening the run directory"):
            if world.rank == 0:
                directory.lock()
                directory.check_config(config)
        self.config = config
        latest = broadcast_from_rank_0("looking for checkpoints", lambda: named(directory.checkpoints, LATEST))
        with raise_on_all_ranks("opening the dataset"):
            check_device(config, world)
            self.data = RunData.open(config, directory, resumed=latest is not None)
            check_shardable(self.data.tables, config.optimizer, world.size)
            self.loader = Loader(
                self.data.maker,
                plan_of(config),
                world.rank,
                world.size,
                config.batch.max_events_per_rank,
                config.data.num_workers,
            )
            self._pool_counts = self.data.pool_counts(config.loss)
            self.validations = ValidationPlan.of(config, self.data.maker, self.loader.steps(0))
        self.model = self._build()
        self.optimizer = StepOptimizer(self.model, config.optimizer)
        self.checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep_last, world)
        self.saver = Saver(self.checkpoints, config.checkpoint.async_save, config.distributed.timeout_seconds)
        self.stop = stop or StopRequest()
        self.identity = self.data.identity(config)
        self.progress = self._restore(latest, init_from)
        self._saved_at = self.progress.step  # loaded from there
        self._users: list[int] = []  # of the last step
        self._validated: dict[str, float] = {}
        self.pauses: list[float] = []  # of training, for each save
        with raise_on_all_ranks("writing down the run"):  # nothing was refused
            if world.rank == 0:
                for remark in remarks(config, self.data.dataset.info):
                    logger.warning("%s", remark)
                directory.write_config(config)
                directory.clear_preempted()
                if latest is None or not directory.has_items():
                    directory.write_items(self.data.dataset.vocabulary(), self.data.items)
        self.watchdog = Watchdog(config.distributed.timeout_seconds * 0.9)

    def _build(self) -> ShardedModel:
        torch.manual_seed(self.config.seed)
        tables = self.data.tables
        model = SequenceModel(self.config, tables)
        sharded, plan = shard(model, tables, self.config.optimizer, self.world)
        initialise(sharded, self.config.tables.init_std, self.config.seed)
        logger.info("sharding plan\n%s", describe(plan, tables))
        with raise_on_all_ranks("writing the sharding plan"):
            if self.world.rank == 0:
                write_atomically(self.directory.path / PLAN, plan_to_json(plan, tables, self.world.size))
        return sharded

    def _restore(self, latest: Path | None, init_from: Path | None) -> Progress:
        planned = self._planned_steps()
        if latest is None:
            if init_from is not None:
                warm_start(init_from, self.model, self.identity, self.data.dataset, self.world)
            self._forget_metrics_after(0)
            return Progress(total_steps=planned)
        info = self.checkpoints.read_info(latest)
        with raise_on_all_ranks("comparing the checkpoint with the run"):
            self.identity.check(info.identity, latest)
        self.checkpoints.load(latest, self.model, self.optimizer)
        self.optimizer.set_steps(info.progress.step)
        self._forget_metrics_after(info.progress.step)
        logger.info("resumed from %s, saved by %d processes", latest.name, info.world_size)
        decay = self.config.optimizer
        if planned > info.progress.total_steps and decay.lr_schedule != "constant" and decay.decay_steps is None:
            logger.warning(
                "%d steps are planned now and %d were when the run began: the learning rate's decay ends there, and "
                "what follows trains at optimizer.min_lr_factor = %g of it. For a longer schedule start a new "
                "--run-dir with --init-from this one",
                planned,
                info.progress.total_steps,
                decay.min_lr_factor,
            )
        progress = broadcast_from_rank_0("looking for the best checkpoint", lambda: self._with_best(info.progress))
        compared = self.validations.active and not self._ended(info.progress)
        if compared and info.progress.best_of not in (None, self.validations.measure):
            logger.warning(
                "validation measures %s now, and %s before: the best so far, %.4f at step %s, is forgotten",
                self.validations.measure,
                info.progress.best_of,
                info.progress.best_metric,
                info.progress.best_step,
            )
            return progress.without_best()
        return progress

    def _with_best(self, progress: Progress) -> Progress:
        """A run that was killed before it noted its best checkpoint notes it now; one that is gone is not the best."""
        if progress.best_step is None:
            return progress
        found = named(self.directory.checkpoints, str(progress.best_step))
        if found is None:
            logger.warning("the best checkpoint, of step %d, is gone: what comes is compared anew", progress.best_step)
            return progress.without_best()
        self.checkpoints.point_to_best(found)
        return progress

    def _forget_metrics_after(self, step: int) -> None:
        with raise_on_all_ranks("cutting the metrics at the checkpoint"):
            if self.world.rank == 0:
                self.directory.forget_metrics_after(step)

    def _planned_steps(self) -> int:
        steps = self.loader.steps(0) * self.config.train.epochs
        return steps if self.config.train.max_steps is None else min(steps, self.config.train.max_steps)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train to the end; the summary."""
        watch = MetricsLogger(self.config, self.directory, self.world, self.progress, self._planned_steps())
        try:
            self._train(watch)
        finally:
            self.watchdog.stop()
            watch.close()
        return self._summary()

    def _train(self, watch: MetricsLogger) -> None:
        """What is left to do."""
        config = self.config
        if self._validation_missed():
            _, saved = self._validate(watch)
            if not saved and self._finished():
                self.save(self._validated)
            self.saver.wait()
        if self._finished():
            logger.info("nothing to do: the run is at step %d, %s", self.progress.step, self._why_finished())
            return
        feed = Feed(self._steps(), self.data.tables.needs_equal_bags)
        pipeline = make_pipeline(config.train.pipeline, self.model, self.optimizer, self.world.device)
        self.optimizer.current = lambda: feed.waiting[0]
        self.model.train()
        logger.info(
            "%d users, %d known items, about %d steps an epoch, busiest process %.2f times the mean",
            len(self.loader.lengths),
            len(self.data.items.ids),
            self.loader.steps(0),
            self.loader.balance(0),
        )
        try:
            self._loop(pipeline, feed, watch)
        except Exception:
            with contextlib.suppress(Exception):
                self.saver.wait()  # an earlier step's checkpoint may be almost there
            raise
        watch.finish()

    def _loop(self, pipeline: Any, feed: Feed, watch: MetricsLogger) -> None:
        """Steps, validations and saves, until the end or until asked to stop."""
        began, stopped, every = time.monotonic() - self.progress.seconds, False, self.config.checkpoint.every_steps
        while not stopped:
            self.watchdog.moved()
            done = self._one_step(pipeline, feed)
            if done is None:
                break
            self.progress = dataclasses.replace(
                self.progress,
                step=self.progress.step + 1,
                position=done.position,
                seconds=round(time.monotonic() - began, 2),
                events=self.progress.events + done.events,
            )
            watch.step(self.progress, done.loss, done.events, self.optimizer.share, self.optimizer.norm)
            if done.save_failed:
                self.saver.wait()  # raises why
            if done.asked_to_stop:
                self._preempted()
                return
            saved = False
            if self.validations.due(self.progress.step):
                with _detached(pipeline):
                    stopped, saved = self._validate(watch)
            if not saved and every is not None and self.progress.step % every == 0:
                self.save()
        if self.validations.active and self.progress.validated_step != self.progress.step:
            with _detached(pipeline):
                self._validate(watch)
        self.save(self._validated if self.progress.validated_step == self.progress.step else None)
        self.saver.wait()

    def _preempted(self) -> None:
        """Asked to leave: save at this step, on all processes, and say so."""
        logger.warning("asked to stop: saving step %d and leaving", self.progress.step)
        self.save()
        self.saver.wait()
        with raise_on_all_ranks("noting the end"):
            if self.world.rank == 0:
                note = {"step": self.progress.step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
                write_atomically(self.directory.path / PREEMPTED, json.dumps(note) + "\n")

    def _ended(self, progress: Progress) -> bool:
        """Whether everything that was asked for has been trained."""
        limit = self.config.train.max_steps
        return progress.position.epoch >= self.config.train.epochs or (limit is not None and progress.step >= limit)

    def _finished(self) -> bool:
        return self._ended(self.progress) or self.validations.enough(self.progress)

    def _why_finished(self) -> str:
        if self._ended(self.progress):
            return "which is all that train.epochs and train.max_steps ask for"
        return (
            f"after {self.validations.patience} validations without a better one: to go on, raise validation.patience "
            "or set it to null"
        )

    def _steps(self) -> Iterator[Step]:
        config = self.config
        maker = StepMaker(config.loss, self._pool_counts, self.data.items.ids, self.data.tables, config.seed)
        steps = self.loader.converted(self.progress.position, config.train.epochs, maker)
        left = math.inf if config.train.max_steps is None else config.train.max_steps - self.progress.step
        number = 0
        while number < left:
            step: Step | None = None
            with raise_on_all_ranks("reading training data"):
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
        step, norm = self.progress.step + 1, self.optimizer.norm
        if not math.isfinite(loss):
            self._stop(step, f"the loss of step {step} is {loss}", summed, users)
        if norm is not None and not math.isfinite(norm):
            self._stop(step, f"the norm of the gradients of step {step} is {norm}", summed, users)
        self._users = users
        return _Done(loss, int(all_events), about.end, asked > 0, failed > 0)

    def _check_finite(self) -> None:
        """Weights that are not finite must not take a good checkpoint's place: a collective."""
        values = [part.tensor for part in local_parts(self.model)]
        values += [value for name, value in self.model.named_parameters() if table_of(name) is None]
        # in parts: the masks of a whole table would be larger than the table
        parts = (part for value in values for part in value.detach().reshape(-1).split(_AT_ONCE))
        bad = torch.tensor(float(not all(bool(part.isfinite().all()) for part in parts)))
        dist.all_reduce(bad)
        if bad > 0:
            step = self.progress.step
            self._stop(step, f"after step {step} weights are not finite", math.nan, self._users)

    def _stop(self, step: int, why: str, own: float, users: list[int]) -> None:
        """Write down whose events the step had, and raise, on every process."""
        path = self.directory.path / f"failed-step-{step}-rank-{self.world.rank}.json"
        write_atomically(path, json.dumps({"own_loss": str(own), "user_rows": users}) + "\n")
        with contextlib.suppress(CheckpointError):
            self.saver.wait()  # of a step before this one
        last = named(self.directory.checkpoints, LATEST)
        raise TrainingError(
            f"{why}: training stops. The rows of the batch's users are "
            f"in {path.parent}/failed-step-{step}-rank-*.json; "
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
            with raise_on_all_ranks("writing to a checkpoint"):
                if self.world.rank == 0 and metrics:
                    self.checkpoints.amend(about)
            return
        self._check_finite()
        self.pauses.append(self.saver.save(state_of(self.model, self.optimizer), about))
        self._saved_at = self.progress.step

    # --- validation --------------------------------------------------------------------------------------------------

    def _validation_missed(self) -> bool:
        """Whether a run that was stopped had no time for the validation of its last step."""
        if not self.validations.active or self.progress.step in (0, self.progress.validated_step):
            return False
        return self._finished() or self.validations.due(self.progress.step)

    def _validate(self, watch: MetricsLogger) -> tuple[bool, bool]:
        """Whether to stop, and whether a checkpoint was written."""
        wanted = self.config.validation
        self._check_finite()
        self._validated = metrics = self.validate()
        self.progress = self.progress.validated(metrics[wanted.metric], self.validations.measure)
        best = self.progress.best_step == self.progress.step
        watch.validated(self.progress.step, metrics)
        if best:
            self.save(metrics, best=True)
        stop = self.validations.enough(self.progress)
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
        config, users = self.config, self.validations.users
        return validate(
            self.model,
            self.data.maker,
            self.data.tables,
            self.data.items.ids,
            config.loss.similarity,
            users,
            self.loader.lengths[users],
            config.batch.max_length,
            self.world,
            config.validation.filter_seen,
            self.watchdog.moved,
        )

    def _summary(self) -> dict[str, Any]:
        seconds, events = self.progress.seconds, self.progress.events
        summary = {
            "step": self.progress.step,
            "epoch": self.progress.position.epoch,
            "seconds": seconds,
            "events_per_second": round(events / seconds) if seconds else 0,
            "best_metric": self.progress.best_metric,
            "best_step": self.progress.best_step,
            "metric": self.config.validation.metric,
            "peak_memory_mb": peak_memory_mb(self.world.device),
            "longest_pause_of_a_save": round(max(self.pauses, default=0.0), 4),
            "preempted": (self.directory.path / PREEMPTED).exists(),
        }
        with raise_on_all_ranks("writing the summary"):
            if self.world.rank == 0:
                summary |= self.directory.larger_peaks(summary)
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


@contextmanager
def _detached(pipeline: Any) -> Iterator[None]:
    """The model without what a pipeline put around its lookups."""
    if hasattr(pipeline, "detach"):
        pipeline.detach()
    yield
    if hasattr(pipeline, "attach"):
        pipeline.attach(sparse_dist=False)  # ids of the batch that it has read ahead are on their way already
