"""Training batches of one rank, from any position, with or without worker processes.

A position is an epoch and a step, and a step's sequences follow from these two alone. So a plain ``DataLoader`` over
positions is enough: it keeps the order, its workers carry no state, and to resume is to begin at another step.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from fuxi_torchrec import machine
from fuxi_torchrec.data.batches import BatchMaker, EventBatch
from fuxi_torchrec.data.schedule import Plan, Position, Schedule, streams_of_rank
from fuxi_torchrec.data.survey import survey
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.processes import end_with_parent

logger = get_logger(__name__)

_PER_CORE = 4  # reading processes, at most: more only wait for each other
Converted = TypeVar("Converted")
# what becomes of a step's micro-batches, in the process that reads them
Convert = Callable[[Position, list[EventBatch]], Converted]


class Loader:
    """The micro-batches of one rank, epoch after epoch.

    Args:
        maker: the dataset with its split and known items.
        plan: how to batch.
        rank, world_size: this rank among all.
        max_events_per_rank: events of a micro-batch, at most; one sequence may exceed it.
        num_workers: processes that read ahead.
        lengths: training events of each user; counted here if None.
    """

    def __init__(
        self,
        maker: BatchMaker,
        plan: Plan,
        rank: int = 0,
        world_size: int = 1,
        max_events_per_rank: int | None = None,
        num_workers: int = 0,
        lengths: Ints | None = None,
    ) -> None:
        most = machine.cores() * _PER_CORE
        if num_workers > most:
            what = f"data.num_workers = {num_workers}: at most {most} processes can read"
            raise DataError(f"{what}, {_PER_CORE} on each of this machine's {machine.cores()} cores")
        self.streams = streams_of_rank(rank, world_size, plan.num_streams)
        self.maker, self.rank, self.world_size = maker, rank, world_size
        self.max_events_per_rank, self.num_workers = max_events_per_rank, num_workers
        self.lengths = survey(maker).train_lengths if lengths is None else lengths
        self.schedule = Schedule(self.lengths, maker.reader.block_of_user, plan)
        if not len(self.schedule.sequences):
            why = "no user has two events in the training split"
            raise DataError(f"{maker.reader.dataset.path}: nothing to train on: {why}")
        self._check_cache()

    def cache_bytes(self) -> int:
        """What each reading process should keep of blocks, so that none is read in one step and again in the next.

        That is the blocks whose users are mixed at one time in this rank's streams, and a quarter more: when a
        stream goes on to its next blocks, those it has done with are not the first to be dropped.
        """
        sizes = self.maker.reader.block_bytes()
        total = 0
        for stream in self.streams:
            blocks = np.unique(self.schedule.block[self.schedule.all_of(0, stream)])
            total += int(np.sort(sizes[blocks])[::-1][: self.schedule.plan.shuffle_blocks].sum())
        return min(total * 5 // 4, int(sizes.sum()))

    def _check_cache(self) -> None:
        """Warn if blocks are going to be read again and again."""
        each, given, readers = self.cache_bytes(), self.maker.reader.cache_bytes, max(1, self.num_workers)
        if each * readers <= given:
            return
        blocks = self.schedule.plan.shuffle_blocks
        logger.warning(
            "%s: each of %d reading processes needs %.1f MiB for the blocks that are mixed at one time, and they share "
            "%.1f MiB: blocks will be read again in almost every step. Set shuffle_blocks (batch.shuffle_blocks) to %d "
            "(it is %d), take fewer workers (data.num_workers), or give the reader cache_bytes=%d (data.cache_mib=%d)",
            *(self.maker.reader.dataset.path, readers, each / 2**20, given / 2**20),
            *(max(1, blocks * given // (each * readers)), blocks, each * readers, -(-each * readers // 2**20)),
        )

    def steps(self, epoch: int) -> int:
        """Steps of an epoch, the same on every rank."""
        return self.schedule.steps(epoch)

    def converted(self, start: Position, end_epoch: int, convert: Convert[Converted]) -> Iterator[Converted]:
        """What ``convert`` makes of each step from a position to the beginning of an epoch.

        Workers run it, if there are any, and stay for the whole way, or until the calling thread ends; it must be
        picklable then.
        """
        if self.num_workers:
            self.maker.reader.forget()  # the workers have what memory there is
        loader = DataLoader(
            _Steps(self, convert),
            batch_size=None,
            generator=torch.Generator(),  # or it would draw from the one that dropout uses
            sampler=self._positions(start, end_epoch),
            num_workers=self.num_workers,
            prefetch_factor=4 if self.num_workers else None,
            multiprocessing_context="spawn" if self.num_workers else None,
            worker_init_fn=partial(_begin_worker, os.getpid()),
        )
        return iter(loader)

    def _positions(self, start: Position, end_epoch: int) -> Iterator[Position]:
        for epoch in range(start.epoch, end_epoch):
            for step in range(start.step if epoch == start.epoch else 0, self.steps(epoch)):
                yield Position(epoch, step)

    def epoch(self, start: Position) -> Iterator[EventBatch]:
        """The micro-batches from a position to the end of its epoch."""
        return chain.from_iterable(self.converted(start, start.epoch + 1, _unchanged))

    def step(self, position: Position) -> list[EventBatch]:
        """The micro-batches of one step; the last one carries the position after it."""
        epoch, step = position.epoch, position.step
        after = Position(epoch, step + 1) if step + 1 < self.steps(epoch) else Position(epoch + 1, 0)
        *parts, last = self._parts(position)
        batches = [self.maker.training(self.schedule, part, epoch) for part in parts]
        return [*batches, self.maker.training(self.schedule, last, epoch, after)]

    def micro_batches(self, position: Position) -> int:
        """How many a step has, the same on every rank."""
        return len(self._parts(position))

    def _parts(self, position: Position) -> list[Ints]:
        return self.schedule.micro_batches(
            position.epoch, position.step, self.rank, self.world_size, self.max_events_per_rank
        )

    def most_events(self, epoch: int) -> int:
        """Events of the largest micro-batch of any rank, at most."""
        largest, longest = (
            int(self.schedule.loads(epoch, self.world_size).max()),
            int(self.schedule.sequences.cost.max()),
        )
        return largest if self.max_events_per_rank is None else min(largest, max(self.max_events_per_rank, longest))

    def balance(self, epoch: int) -> float:
        """Events of each step's busiest rank over the mean, for which the others wait: 1 is perfect."""
        loads = self.schedule.loads(epoch, self.world_size)
        return float(loads.max(0).sum() * self.world_size / max(1, int(loads.sum())))


def _begin_worker(rank: int, _: int) -> None:
    """A worker has its share of the memory for blocks, and ends with the process of its rank.

    Launchers signal whole process groups, but it is for the rank to say when to stop: it saves first.
    """
    end_with_parent(rank)
    os.setpgrp()
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, _Steps)
    info.dataset.loader.maker.reader.cache_bytes //= info.num_workers


def _unchanged(position: Position, micro_batches: list[EventBatch]) -> list[EventBatch]:
    return micro_batches


class _Steps(Dataset[Converted]):
    """Positions to what is made of their micro-batches, for a DataLoader."""

    def __init__(self, loader: Loader, convert: Convert[Converted]) -> None:
        self.loader, self.convert = loader, convert

    def __getitem__(self, position: Position) -> Converted:
        return self.convert(position, self.loader.step(position))
