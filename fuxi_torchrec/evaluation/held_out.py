"""Ranks of held-out targets among all candidates: what validation and evaluation share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fuxi_torchrec.config import Config
from fuxi_torchrec.data.batches import BatchMaker, EventBatch
from fuxi_torchrec.distributed import raise_on_all_ranks
from fuxi_torchrec.evaluation.encoding import UserEncoder
from fuxi_torchrec.evaluation.ranking import Queries, ShardedCatalogue
from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.tasks.base import Correction

RequestTime = Literal["target", "last"]
REQUEST_TIMES: tuple[RequestTime, ...] = ("target", "last")
HeldOutPart = Literal["test", "valid"]

_EVERYTHING = 2**62  # events: no history is longer
_RANKED_USERS = 512  # scored together: matrix products of fewer are slower

# whole histories of a batch's users, and their targets; called where it may fail on one rank only
Look = Callable[[EventBatch, Tensor], None]


@dataclass(frozen=True)
class Ranked:
    """Users that were ranked together."""

    ranks: dict[RequestTime, Tensor]  # of all ranks' users, by request time
    own: slice  # which of them are this rank's
    rows: Tensor  # of this rank's users in the dataset
    targets: Tensor  # of this rank's users
    lengths: Tensor  # of this rank's users' whole histories; those that are encoded, if no whole histories were read
    users: int  # how many all ranks have ranked so far


# users encoded and not yet ranked: vectors by request time, corrections likewise, rows, targets, lengths, and the items
# of their histories
_Waiting = list[tuple[list[Tensor], list[Correction | None], Tensor, Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class HeldOut:
    """Held-out targets of a dataset, to be ranked by a model."""

    encoder: UserEncoder
    maker: BatchMaker  # the dataset with its split
    part: HeldOutPart  # which targets
    candidates: Ints  # ids in order
    config: Config  # the run's
    filter_seen: bool = False  # leave items of the user's whole history out of the candidates; the target stays

    @torch.no_grad()
    def ranked(
        self,
        users: Ints,
        lengths: Ints,
        request_times: Sequence[RequestTime],
        look: Look | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> Iterator[Ranked]:
        """Rank users, some hundred at a time: a collective.

        Args:
            users: rows in order; all of them have a target.
            lengths: events of each, about.
            look: is shown whole histories too.
            moved: is called before every batch.
        """
        world, tables = self.encoder.world, self.encoder.tables
        items, dim, about = self.encoder.module.item_lookup(), tables.items.dim, self.encoder.lookups.items
        candidates, similarity = torch.from_numpy(self.candidates), self.config.loss.similarity
        catalogue = ShardedCatalogue(items, candidates, dim, similarity, world, about)
        max_length = self.config.batch.max_length
        partition = self.encoder.partition(users, np.minimum(lengths, max_length))
        waiting, done = _Waiting(), 0
        for number, flush in enumerate(partition.flushes(_RANKED_USERS)):
            moved()
            with raise_on_all_ranks("reading users to evaluate"):
                batch = self.maker.evaluation(partition.batches[world.rank][number], self.part, max_length)
                whole = self._whole(batch) if self.filter_seen or look is not None else batch
                last = batch.offsets[1:] - 1
                targets = batch.targets[last]
                if look is not None:
                    look(whole, targets)
            times = {"target": batch.request_timestamps, "last": batch.timestamps[last]}
            task, asked = self.encoder.module.task, [times[each] for each in request_times]
            vectors = self.encoder.vectors(batch, asked)
            corrections = [task.correction(batch, *each) for each in zip(vectors, asked, strict=True)]
            waiting.append((vectors, corrections, batch.users, targets, whole.offsets.diff(), whole.items))
            done += sum(len(batches[number]) for batches in partition.batches)
            if flush:
                yield self._rank(catalogue, waiting, request_times, done)
                waiting = _Waiting()

    def _rank(
        self, catalogue: ShardedCatalogue, waiting: _Waiting, request_times: Sequence[RequestTime], users: int
    ) -> Ranked:
        vectors_of, corrections_of, *rest = zip(*waiting, strict=True)
        rows, targets, lengths, seen = (torch.cat(each) for each in rest)
        ranks, own = {}, slice(0)
        parts = (zip(*each, strict=True) for each in (vectors_of, corrections_of))
        for each, vectors, corrections in zip(request_times, *parts, strict=True):
            queries = Queries(torch.cat(vectors), targets, correction=Correction.stack(corrections))
            if self.filter_seen:
                queries.seen, queries.seen_lengths = seen, lengths
            ranks[each], counts = catalogue.ranks(queries)
            first = int(counts[: self.encoder.world.rank].sum())
            own = slice(first, first + len(targets))
        return Ranked(ranks, own, rows, targets, lengths, users)

    def _whole(self, batch: EventBatch) -> EventBatch:
        """The batch's users with everything before their targets."""
        longest = int(batch.offsets.diff().max()) if len(batch) else 0
        if longest < self.config.batch.max_length:
            return batch
        return self.maker.evaluation(batch.users.numpy(), self.part, _EVERYTHING)
