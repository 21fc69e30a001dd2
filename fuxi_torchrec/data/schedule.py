"""Which part of which user is trained in which step: a pure function of lengths, seed, epoch and step.

The users are cut into streams of about equal cost, each a range of rows. A step gives every stream its share of the
budget as credit; a stream emits while it has credit, and what its last sequence costs too much is a debt that it
carries. So the step of a sequence follows from what comes before it in its stream, and nothing depends on the number of
ranks: they only share out the streams. A position in the data is an epoch and a step.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fuxi_torchrec.events.batching import batch_ends
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.histories import Ints, bounds_of
from fuxi_torchrec.schema import Record

_MOST, _MOST_STREAMS = 2**40, 2**16  # each stream costs time in every step, and memory
Truncation = Literal["recent", "windows"]


@dataclass(frozen=True)
class Position(Record):
    """Where training stands: the next step of an epoch."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class Plan:
    """How a dataset becomes batches; part of a run's identity.

    Attributes:
        max_length: input events of a sequence, at most.
        truncation: ``recent`` keeps the last max_length events; of ``windows`` each is a sequence of max_length events.
        batch_events: input events of a global batch, about; or
        batch_users: sequences of a global batch.
        num_streams: at least the number of ranks.
        shuffle_blocks: blocks whose sequences are mixed with each other.
        seed: of the order.
    """

    max_length: int
    truncation: Truncation = "recent"
    batch_events: int | None = None
    batch_users: int | None = None
    num_streams: int = 16
    shuffle_blocks: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.batch_events is None) == (self.batch_users is None):
            raise ValueError("give one of batch_events and batch_users, not both and not neither")
        for name in ("max_length", "batch_events", "batch_users", "num_streams", "shuffle_blocks"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST:
                bound = "at least 1" if value < 1 else f"at most {_MOST}"
                raise ValueError(f"{name} must be {bound}, not {value}")
        if self.num_streams > _MOST_STREAMS:
            what = f"num_streams (batch.streams) must be at most {_MOST_STREAMS}, not {self.num_streams}"
            raise ValueError(f"{what}: there need be no more than ranks")
        if self.truncation not in ("recent", "windows"):
            raise ValueError(f"truncation must be 'recent' or 'windows', not {self.truncation!r}")


@dataclass(frozen=True)
class SequenceTable:
    """Parts of users: window ``window`` of the user in row ``user``, of about ``cost`` events."""

    user: Ints
    window: Ints
    cost: Ints

    def __len__(self) -> int:
        return len(self.user)


def sequences_of(lengths: Ints, plan: Plan) -> SequenceTable:
    """All sequences of users of these lengths; a user of one event has nothing to predict and no sequence."""
    inputs = np.maximum(lengths - 1, 0)
    users = np.arange(len(lengths))
    if plan.truncation == "recent":
        keep = inputs > 0
        return SequenceTable(
            users[keep], np.zeros(int(keep.sum()), np.int64), np.minimum(inputs, plan.max_length)[keep]
        )
    windows = -(-inputs // plan.max_length)
    user = np.repeat(users, windows)
    window = np.arange(len(user)) - np.repeat(np.cumsum(windows) - windows, windows)
    return SequenceTable(user, window, np.minimum(inputs[user] - window * plan.max_length, plan.max_length))


def streams_of_rank(rank: int, world_size: int, num_streams: int) -> range:
    """The streams of a rank: a range, so that it reads neighbouring rows."""
    if world_size > num_streams:
        cure = "raise num_streams (batch.streams)"
        raise DataError(f"{world_size} ranks need at least as many streams, there are {num_streams}: {cure}")
    return range(num_streams * rank // world_size, num_streams * (rank + 1) // world_size)


def turns(num_streams: int) -> list[int]:
    """When each stream begins: neighbours far apart, so that every rank has streams among those of a step.

    Example:
        >>> turns(8)  # of two ranks with four streams each, both have two among the first four
        [0, 4, 2, 6, 1, 5, 3, 7]
    """
    bits = (num_streams - 1).bit_length()
    mirrored = [int(f"{stream:0{bits}b}"[::-1], 2) for stream in range(num_streams)]
    turn = {value: n for n, value in enumerate(sorted(mirrored))}
    return [turn[value] for value in mirrored]


class Schedule:
    """The steps of a dataset.

    Args:
        lengths: training events of each user, in row order.
        block_of_user: the block (row group) that holds each user; never decreases.
        plan: how to batch.
    """

    def __init__(self, lengths: Ints, block_of_user: Ints, plan: Plan) -> None:
        self.plan = plan
        self.sequences = sequences_of(lengths, plan)
        user = self.sequences.user
        self.block = block_of_user[user]
        cost = self.sequences.cost if plan.batch_events is not None else np.ones(len(self.sequences), np.int64)
        self._charge = cost
        # streams are ranges of sequences with about equal charge, cut between users
        total = bounds_of(cost)
        wanted = total[-1] * np.arange(plan.num_streams + 1) / plan.num_streams
        edges = np.minimum(np.searchsorted(total, wanted), len(cost))
        edges[-1] = len(cost)
        begins = np.append(np.flatnonzero(np.diff(user, prepend=-1)), len(cost))
        self._edges = begins[np.searchsorted(begins, edges)]  # a user's windows stay in one stream
        self._kept: dict[int, list[tuple[Ints, Ints]]] = {}
        self._steps: dict[int, int] = {}  # asked for after every step, also of other epochs

    def steps(self, epoch: int) -> int:
        """Steps of an epoch, the same on every rank."""
        if epoch not in self._steps:
            self._steps[epoch] = max((int(at[-1]) + 1 for _, at in self._epoch(epoch) if len(at)), default=0)
        return self._steps[epoch]

    def stream(self, epoch: int, step: int, stream: int) -> Ints:
        """The sequences (indices into ``sequences``) that a stream emits in a step."""
        order, steps = self._epoch(epoch)[stream]
        a, b = np.searchsorted(steps, [step, step + 1])
        return order[a:b]

    def all_of(self, epoch: int, stream: int) -> Ints:
        """All sequences of a stream, in the epoch's order."""
        return self._epoch(epoch)[stream][0]

    def batch(self, epoch: int, step: int, rank: int = 0, world_size: int = 1) -> Ints:
        """The sequences that a rank trains in a step."""
        own = streams_of_rank(rank, world_size, self.plan.num_streams)
        return np.concatenate([self.stream(epoch, step, stream) for stream in own])

    def loads(self, epoch: int, world_size: int) -> Ints:
        """(ranks, steps) events that each rank trains in each step."""
        found = np.zeros((world_size, self.steps(epoch)), np.int64)
        for rank in range(world_size):
            for stream in streams_of_rank(rank, world_size, self.plan.num_streams):
                order, steps = self._epoch(epoch)[stream]
                np.add.at(found[rank], steps, self.sequences.cost[order])
        return found

    def micro_batches(self, epoch: int, step: int, rank: int, world_size: int, max_events: int | None) -> list[Ints]:
        """A rank's batch in parts of at most ``max_events`` events (or one sequence), as many as every other's.

        Every rank computes the parts of all, so that they agree without a collective; those with fewer get empty ones.
        """
        parts = [self._parts(self.batch(epoch, step, r, world_size), max_events) for r in range(world_size)]
        missing = max(map(len, parts)) - len(parts[rank])
        return parts[rank] + [np.zeros(0, np.int64)] * missing

    def _parts(self, batch: Ints, max_events: int | None) -> list[Ints]:
        if max_events is None or not len(batch):
            return [batch]
        return np.split(batch, batch_ends(self.sequences.cost[batch], max_events)[:-1])

    def _epoch(self, epoch: int) -> list[tuple[Ints, Ints]]:
        """Of each stream: its sequences in order, and the step of each; the last epoch asked for is kept."""
        if epoch not in self._kept:
            self._kept = {epoch: self._make_epoch(epoch)}
        return self._kept[epoch]

    def _make_epoch(self, epoch: int) -> list[tuple[Ints, Ints]]:
        plan = self.plan
        budget = plan.batch_events or plan.batch_users
        assert budget is not None
        usual = int(self._charge.mean()) if len(self._charge) else 0
        found = []
        for stream, turn in enumerate(turns(plan.num_streams)):
            order = self._order(stream, epoch)
            charge = self._charge[order]
            spent_before = np.cumsum(charge) - charge
            # emitted in the first step t for which the credit t · budget / streams exceeds what was spent before; the
            # streams begin a little after one another, so that they do not all emit in the same steps
            steps = (spent_before * plan.num_streams + turn * usual) // budget
            found.append((order, steps))
        # sequences longer than a stream's credit leave steps in which nobody emits: those are no steps
        used = np.unique(np.concatenate([steps for _, steps in found]))
        return [(order, np.searchsorted(used, steps)) for order, steps in found]

    def _order(self, stream: int, epoch: int) -> Ints:
        """A stream's sequences, shuffled in bounded memory: blocks change places, then neighbours among them mix."""
        a, b = int(self._edges[stream]), int(self._edges[stream + 1])
        generator = np.random.default_rng([self.plan.seed, epoch, stream])
        blocks = np.unique(self.block[a:b])
        place = generator.permutation(len(blocks))
        group = place[np.searchsorted(blocks, self.block[a:b])] // self.plan.shuffle_blocks
        return a + np.lexsort((generator.random(b - a), group))
