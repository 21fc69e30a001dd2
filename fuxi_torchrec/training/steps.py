"""One step after another: its micro-batches, how it went, and what the ranks tell each other about it."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.embeddings.inputs import gathered
from fuxi_torchrec.embeddings.pipeline import ShardedModel, make_pipeline
from fuxi_torchrec.embeddings.sharding import local_parts
from fuxi_torchrec.embeddings.tables import table_of
from fuxi_torchrec.training.feed import Feed, StepMaker
from fuxi_torchrec.training.optimizers import learning_rate_share
from fuxi_torchrec.training.run import Run

_AT_ONCE = 2**22  # elements that are looked at together


@dataclass(frozen=True)
class Done:
    """A step that was trained."""

    step: int  # its number, from 1
    report: dict[str, Tensor]  # what the task says of it, of this rank: float64 tensors that nobody has read back yet
    norm: Tensor | None  # of its gradients, if they are clipped
    finite: Tensor  # whether loss and norm are, likewise a tensor
    events: int  # of all ranks
    users: list[int]  # rows of this rank's users
    position: Position  # where training stands after it


class StepRunner:
    """Trains steps from where a run stands.

    What the ranks tell each other travels with the sizes of a batch, in one exchange a step (:class:`Feed`): whether
    one was preempted, whether a save in the background failed, and the first step whose loss was not finite.
    """

    def __init__(self, run: Run, preempted: Callable[[], bool]) -> None:
        self.run, self._preempted = run, preempted
        self.stopped = self.save_failed = False  # on any rank
        self.last: Done | None = None
        self._unchecked: deque[Done] = deque()  # of which the ranks do not know yet that their losses are finite
        self._checking = 0
        config, position = run.config, run.progress.position
        maker = StepMaker(run.module.task.target_maker(run.data.item_set, config.seed), run.tables, run.data.lookups)
        left = None if config.train.max_steps is None else config.train.max_steps - run.progress.step
        steps = itertools.islice(run.loader.converted(position, config.train.epochs, maker), left)
        self.feed = Feed(steps, run.tables.needs_equal_bags, self, position, run.loader.micro_batches)
        self.pipeline: Any = make_pipeline(config.train.pipeline, run.model, run.optimizer, run.world.device)
        run.optimizer.current = lambda: self.feed.waiting[0]
        run.model.train()

    def train(self) -> Done | None:
        """Train all micro-batches of the run's next step; None at the end of the feed."""
        run, optimizer, progress = self.run, self.run.optimizer, self.run.progress
        report: dict[str, Tensor] = {}
        events = 0
        users: list[int] = []
        optimizer.share = learning_rate_share(run.config.optimizer, progress.step, progress.total_steps)
        # dropout follows from the step alone, so that a resumed run repeats it
        key = [run.config.seed, progress.step, run.world.rank]
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
        while True:
            try:
                sums = self.pipeline.progress(self.feed)
            except StopIteration:
                return None
            about = self.feed.waiting.popleft()
            for name, value in sums.items():
                report[name] = report.get(name, 0.0) + value.double() * about.scale
            events += about.events
            users += about.users.tolist()
            if about.last:
                break
        norm = optimizer.norm
        finite = report["loss"].isfinite() if norm is None else report["loss"].isfinite() & norm.isfinite()
        self.last = Done(progress.step + 1, report, norm, finite, events, users, about.end)
        self._unchecked.append(self.last)
        return self.last

    @contextmanager
    def detached(self) -> Iterator[None]:
        """The model without what the pipeline put around its lookups."""
        if hasattr(self.pipeline, "detach"):
            self.pipeline.detach()
        yield
        if hasattr(self.pipeline, "attach"):
            self.pipeline.attach(sparse_dist=False)  # ids of the batch that it has read ahead are on their way already

    # --- between ranks -----------------------------------------------------------------------------------------------

    def say(self) -> list[float]:
        """Whether this rank is preempted, whether its save failed, and its first step that is not finite."""
        # elsewhere than on a CPU the newest step is still being computed, and nobody waits for it: the next exchange
        # tells of it
        self._checking = len(self._unchecked) - (self.run.world.device.type != "cpu")
        return [float(self._preempted()), float(self.run.saver.failed), self._first_bad(self._checking)]

    def hear(self, everyone: Tensor) -> bool:
        """Fail on all ranks, end on all ranks, or go on."""
        self._check(everyone[:, 2])
        for _ in range(self._checking):
            self._unchecked.popleft()
        stopped, failed = everyone[:, :2].any(0).tolist()
        self.stopped, self.save_failed = self.stopped or stopped, self.save_failed or failed
        return not self.ending

    @property
    def ending(self) -> bool:
        """Whether some rank is preempted or cannot save; what a pipeline has read ahead may be left."""
        return self.stopped or self.save_failed

    def exchange(self) -> bool:
        """What :class:`Feed` exchanges with every step, where much is to be done before the next: a collective."""
        return self.hear(gathered(torch.tensor(self.say(), dtype=torch.float64)))

    def _first_bad(self, count: int) -> float:
        """The first of so many unchecked steps that is not finite, 0 if all are."""
        steps = itertools.islice(self._unchecked, max(0, count))
        return next((float(done.step) for done in steps if not done.finite), 0.0)

    def _check(self, bad: Tensor) -> None:
        """Fail if any rank has a step that is not finite."""
        if bad.any():
            first = int(bad[bad > 0].min())
            self.read(next(done for done in self._unchecked if done.step == first))

    def read(self, done: Done) -> dict[str, float]:
        """A step's report over all ranks: a collective. Fails on all ranks if the loss or the norm is not finite."""
        names = list(done.report)
        sums = torch.stack([done.report[name] / self.run.world.size for name in names]).cpu()
        dist.all_reduce(sums)
        found = dict(zip(names, sums.tolist(), strict=True))
        values = {"loss": found["loss"]}
        if done.norm is not None:
            values["norm of the gradients"] = float(done.norm)
        for name, value in values.items():
            if not math.isfinite(value):
                why = f"the {name} of step {done.step} is {value}"
                self.run.fail(done.step, why, float(done.report["loss"]), done.users)
        return found

    def check_losses(self) -> None:
        """Fail on all ranks if a step so far was not finite, the newest included: a collective."""
        self._check(gathered(torch.tensor([self._first_bad(len(self._unchecked))])))


def all_finite(model: ShardedModel) -> bool:
    """Whether all weights are, on all ranks: a collective."""
    values = [part.tensor for part in local_parts(model)]
    values += [value for name, value in model.named_parameters() if table_of(name) is None]
    # in parts: the masks of a whole table would be larger than the table
    parts = (part for value in values for part in value.detach().reshape(-1).split(_AT_ONCE))
    bad = torch.tensor(float(not all(bool(part.isfinite().all()) for part in parts)))
    dist.all_reduce(bad)
    return not bad
