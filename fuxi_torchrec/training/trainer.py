"""The training job: steps, validations and saves, until the end or until preempted."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.artifacts import write_atomically
from fuxi_torchrec.config import Config
from fuxi_torchrec.distributed import World, raise_on_all_ranks
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint.info import Info
from fuxi_torchrec.training.checkpoint.store import state_of
from fuxi_torchrec.training.interruption import StopRequest, Watchdog
from fuxi_torchrec.training.metrics_logger import MetricsLogger, peak_memory_mb
from fuxi_torchrec.training.run import Run
from fuxi_torchrec.training.run_directory import PREEMPTED, SUMMARY, RunDirectory
from fuxi_torchrec.training.steps import StepRunner, all_finite

logger = get_logger(__name__)

# measures a run's validation targets; called on all ranks, with what to call whenever some of it is done
Validator = Callable[[Run, Callable[[], None]], dict[str, float]]


class Trainer(Run):
    """A run and its loop; ``stop`` says when the job is preempted."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        world: World,
        validator: Validator,
        init_from: Path | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        super().__init__(config, directory, world, init_from)
        self.validator, self.stop = validator, stop or StopRequest()
        self.steps: StepRunner | None = None  # once training has begun
        self._saved_at = self.progress.step  # loaded from there
        self._validated: dict[str, float] = {}
        self.pauses: list[float] = []  # of training, for each save
        self.watchdog = Watchdog(config.distributed.timeout_seconds * 0.9)

    def train(self) -> dict[str, Any]:
        """Train to the end; the summary."""
        metrics = MetricsLogger(self.config, self.directory, self.world, self.progress, self.planned_steps)
        try:
            self._train(metrics)
        finally:
            self.watchdog.stop()
            metrics.close()
        return self._summary()

    def _train(self, metrics: MetricsLogger) -> None:
        if self._validation_missed():
            _, saved = self._validate(metrics)
            if not saved and self._finished():
                self.save(self._validated)
            self.saver.wait()
        if self._finished():
            logger.info("nothing to do: the run is at step %d, %s", self.progress.step, self._why_finished())
            return
        steps = self.begin()
        logger.info(
            "%d users, %d known items, about %d steps an epoch, busiest rank %.2f times the mean",
            len(self.loader.lengths),
            len(self.data.items.ids),
            self.loader.steps(0),
            self.loader.balance(0),
        )
        try:
            self._loop(steps, metrics)
        except Exception:
            with contextlib.suppress(Exception):
                self.saver.wait()  # an earlier step's checkpoint may be almost there
            raise
        metrics.finish()

    def begin(self) -> StepRunner:
        self.steps = StepRunner(self, lambda: self.stop.requested)
        return self.steps

    def _loop(self, steps: StepRunner, metrics: MetricsLogger) -> None:
        began, enough, every = time.monotonic() - self.progress.seconds, False, self.config.checkpoint.every_steps
        while not (enough or steps.ending):
            self.watchdog.moved()
            done = steps.train()
            if done is None:
                break
            self.progress = dataclasses.replace(
                self.progress,
                step=done.step,
                position=done.position,
                seconds=round(time.monotonic() - began, 2),
                events=self.progress.events + done.events,
            )
            metrics.step(self.progress, partial(steps.read, done), done.events, self.optimizer.share, done.norm)
            saved = False
            # a validation takes longer than a preempted job may: ask once more before it
            if self.validations.due(self.progress.position) and steps.exchange():
                with steps.detached():
                    enough, saved = self._validate(metrics)
            if not saved and every is not None and self.progress.step % every == 0:
                self.save()
        unvalidated = self.validations.active and self.progress.validated_step != self.progress.step
        if unvalidated and not steps.ending and steps.exchange():
            with steps.detached():
                self._validate(metrics)
        if steps.save_failed:
            self.saver.wait()  # raises why
        if steps.stopped:
            self._preempted()
            return
        self.save(self._validated if self.progress.validated_step == self.progress.step else None)
        self.saver.wait()

    def _preempted(self) -> None:
        """Save at this step, on all ranks, and say so."""
        logger.warning("preempted: saving step %d and stopping", self.progress.step)
        self.save()
        self.saver.wait()
        with raise_on_all_ranks("noting the end"):
            if self.world.rank == 0:
                note = {"step": self.progress.step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
                write_atomically(self.directory.path / PREEMPTED, json.dumps(note) + "\n")

    def _finished(self) -> bool:
        return self.ended(self.progress) or self.validations.enough(self.progress)

    def _why_finished(self) -> str:
        if self.ended(self.progress):
            return "which is all that train.epochs and train.max_steps ask for"
        return (
            f"after {self.validations.patience} validations without a better one: to go on, raise validation.patience "
            "or set it to null"
        )

    def _check_finite(self) -> None:
        """Nothing that is not finite may take a good checkpoint's place, or be ranked: a collective."""
        if self.steps is not None:
            self.steps.check_losses()
        if not all_finite(self.model):
            last = None if self.steps is None else self.steps.last
            step = self.progress.step
            self.fail(step, f"after step {step} weights are not finite", math.nan, [] if last is None else last.users)

    def save(self, metrics: dict[str, float] | None = None, best: bool = False) -> None:
        """Write a checkpoint, or begin to: a collective."""
        config = strict_yaml.to_dict(self.config)
        info = Info(self.progress, self.identity, metrics or {}, config, self.world.size)
        if self._saved_at == self.progress.step:  # the tensors are there: only what is said of them is new
            self.saver.wait()
            with raise_on_all_ranks("writing to a checkpoint"):
                if self.world.rank == 0 and metrics:
                    self.checkpoints.amend(info, best)
            return
        self._check_finite()
        self.pauses.append(self.saver.save(state_of(self.model, self.optimizer), info, best))
        self._saved_at = self.progress.step

    # --- validation --------------------------------------------------------------------------------------------------

    def _validation_missed(self) -> bool:
        """Whether a run that was stopped had no time for the validation of its last step."""
        if not self.validations.active or self.progress.step in (0, self.progress.validated_step):
            return False
        return self._finished() or self.validations.due(self.progress.position)

    def _validate(self, log: MetricsLogger) -> tuple[bool, bool]:
        """Whether to stop, and whether a checkpoint was written."""
        wanted = self.config.validation
        self._check_finite()
        self._validated = metrics = self.validator(self, self.watchdog.moved)
        self.progress = self.progress.validated(metrics[wanted.metric], self.validations.measure)
        best = self.progress.best_step == self.progress.step
        log.validated(self.progress.step, metrics, self.module.task.shown_metrics)
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
