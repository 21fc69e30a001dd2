"""A run as it stands before its next step: its data, its model, where it was stopped."""

import contextlib
import json
from pathlib import Path
from typing import NoReturn

import torch

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.artifacts import write_atomically
from fuxi_torchrec.config import Config
from fuxi_torchrec.data.loader import Loader
from fuxi_torchrec.distributed import World, broadcast_from_rank_0, check_same, raise_on_all_ranks
from fuxi_torchrec.embeddings.pipeline import ShardedModel
from fuxi_torchrec.embeddings.sharding import describe, initialise, placements, plan_to_json, planned, shard
from fuxi_torchrec.embeddings.tables import Tables
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.machine import memory_bytes
from fuxi_torchrec.training.checkpoint.info import LATEST, CheckpointError, Progress, named
from fuxi_torchrec.training.checkpoint.saver import Saver
from fuxi_torchrec.training.checkpoint.store import Checkpoints
from fuxi_torchrec.training.errors import TrainingError
from fuxi_torchrec.training.model import SequenceModel
from fuxi_torchrec.training.optimizers import StepOptimizer
from fuxi_torchrec.training.planning import check_memory
from fuxi_torchrec.training.run_data import RunData, plan_of, remarks
from fuxi_torchrec.training.run_directory import PLAN, PREEMPTED, RunDirectory
from fuxi_torchrec.training.validation_plan import ValidationPlan
from fuxi_torchrec.training.warm_start import warm_start

logger = get_logger(__name__)

_NEW = Progress()


def check_device(config: Config, world: World) -> None:
    """Refuse what the device cannot do; the same on every rank."""
    if config.train.precision == "bfloat16" and not (
        world.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise TrainingError(
            f"train.precision = bfloat16 needs a CUDA device that computes in it, this is {world.device}: take float32"
        )


class Run:
    """Resumed from its directory if it exists, else new or warm-started from the run ``init_from``: a collective."""

    def __init__(self, config: Config, directory: RunDirectory, world: World, init_from: Path | None = None) -> None:
        self.config, self.world, self.directory = config, world, directory
        check_same("the configuration", strict_yaml.dump(config))
        with raise_on_all_ranks("opening the run directory"):
            if world.rank == 0:
                directory.lock()
                directory.check_config(config)
            check_device(config, world)
        latest = broadcast_from_rank_0("looking for checkpoints", lambda: named(directory.checkpoints, LATEST))
        self.data = RunData.open(config, directory, world, resumed=latest is not None)
        with raise_on_all_ranks("planning steps and validations"):
            self.loader = Loader(
                self.data.maker,
                plan_of(config),
                world.rank,
                world.size,
                config.batch.max_events_per_rank,
                config.data.num_workers,
                self.data.lengths,
            )
            self.validations = ValidationPlan.of(config, self.data.validated, self.loader.steps)
            memory = memory_bytes() // world.local_size
            if world.device.type == "cuda":
                memory = torch.cuda.get_device_properties(world.device).total_memory
            check_memory(config, self.data.dataset.info, world.size, self.loader.most_events(0), memory)
        self.model, self.tables = self._build()
        self.optimizer = StepOptimizer(self.model, config.optimizer)
        self.checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep_last, world)
        self.saver = Saver(self.checkpoints, config.checkpoint.async_save, config.distributed.timeout_seconds)
        self.identity = self.data.identity(config)
        self.progress = self._restore(latest, init_from)
        with raise_on_all_ranks("writing down the run"):  # nothing was refused
            if world.rank == 0:
                for remark in remarks(config, self.data.dataset.info):
                    logger.warning("%s", remark)
                directory.write_config(config)
                directory.forget_metrics_after(self.progress.step)
                (directory.path / PREEMPTED).unlink(missing_ok=True)
                if latest is None or not directory.has_items():
                    directory.write_items(self.data.dataset.vocabulary(), self.data.items)

    @property
    def module(self) -> SequenceModel:
        module = self.model.module
        assert isinstance(module, SequenceModel)
        return module

    def _build(self) -> tuple[ShardedModel, Tables]:
        """The model, and the tables as they are sharded."""
        torch.manual_seed(self.config.seed)
        tables = self.data.tables
        model = SequenceModel(self.config, tables)
        sharded, plan = shard(model, tables, self.config.optimizer, self.world)
        initialise(sharded, self.config.tables.init_std, self.config.seed)
        logger.info("sharding plan\n%s", describe(placements(plan, tables)))
        with raise_on_all_ranks("writing the sharding plan"):
            if self.world.rank == 0:
                write_atomically(self.directory.path / PLAN, plan_to_json(plan, tables, self.world.size))
        return sharded, planned(plan, tables)

    def _restore(self, latest: Path | None, init_from: Path | None) -> Progress:
        planned = self.planned_steps()
        if latest is None:
            if init_from is not None:
                warm_start(init_from, self.model, self.identity, self.data.dataset, self.world)
            return Progress(total_steps=planned)
        info = self.checkpoints.read_info(latest)
        with raise_on_all_ranks("comparing the checkpoint with the run"):
            self.identity.check(info.identity, latest)
            self.directory.check_trained(self.config, info, latest)
        self.checkpoints.load(latest, self.model, self.optimizer)
        self.optimizer.set_steps(info.progress.step)
        logger.info("resumed from %s, saved by %d ranks", latest.name, info.world_size)
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
        compared = self.validations.active and not self.ended(info.progress)
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

    def planned_steps(self, progress: Progress = _NEW) -> int:
        """Of the run, about: epochs to come are taken to be as long as the one that it is in."""
        position, steps = progress.position, progress.step - progress.position.step
        if position.epoch < self.config.train.epochs:
            steps += self.loader.steps(position.epoch) * (self.config.train.epochs - position.epoch)
        return steps if self.config.train.max_steps is None else min(steps, self.config.train.max_steps)

    def ended(self, progress: Progress) -> bool:
        """Whether all epochs or steps of the configuration have been trained."""
        limit = self.config.train.max_steps
        return progress.position.epoch >= self.config.train.epochs or (limit is not None and progress.step >= limit)

    def fail(self, step: int, why: str, own: float, users: list[int]) -> NoReturn:
        """Write down whose events the step had, and raise, on every rank."""
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
