"""Exact metrics of held-out targets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.data.batches import BatchMaker, EventBatch
from fuxi_torchrec.data.splits import Part
from fuxi_torchrec.distributed import World, failing_together
from fuxi_torchrec.embeddings.inputs import Candidates, ModelInput, agree, make_input
from fuxi_torchrec.embeddings.pipeline import ShardedModel
from fuxi_torchrec.embeddings.tables import Tables
from fuxi_torchrec.training.loss import Metric
from fuxi_torchrec.training.model import SequenceModel
from fuxi_torchrec.training.ranking import Catalogue, Metrics, Queries

Ints = NDArray[np.int64]

EVERYTHING = 2**62  # events: no history is longer
_TOKENS = 2**15  # events of a batch on a process


@dataclass(frozen=True)
class Batches:
    """The users to evaluate, divided among processes, as many batches on each."""

    users: list[Ints]

    @staticmethod
    def of(users: Ints, lengths: Ints, world: World, tokens: int = _TOKENS) -> "Batches":
        """Batches of about equal events.

        Args:
            users: rows, in order.
            lengths: events of each of them.
        """
        shares = np.array_split(np.arange(len(users)), world.size)
        all_batches = [_by_tokens(users[share], lengths[share], tokens) for share in shares]
        most = max(map(len, all_batches), default=0)
        own = all_batches[world.rank]
        return Batches(own + [np.zeros(0, np.int64)] * (most - len(own)))


def _by_tokens(users: Ints, lengths: Ints, tokens: int) -> list[Ints]:
    if not len(users):
        return []
    batch = (np.cumsum(lengths) - 1) // tokens
    return np.split(users, np.flatnonzero(np.diff(batch)) + 1)


@torch.no_grad()
def user_vectors(model: ShardedModel, batch: EventBatch, tables: Tables) -> Tensor:
    """(B, D) each user at the request time: a collective."""
    rows, ready = event_rows(model, batch, tables)
    encoded: Tensor = model.module.head.encode(rows, ready)
    return encoded.index_select(0, (batch.offsets[1:] - 1).to(model.device))


@torch.no_grad()
def event_rows(model: ShardedModel, batch: EventBatch, tables: Tables) -> tuple[Tensor, ModelInput]:
    """(T, D) rows of the events as the encoder takes them, and the batch beside them: a collective."""
    module = model.module
    assert isinstance(module, SequenceModel)
    given = make_input(
        batch,
        torch.zeros(batch.events),
        Candidates(np.zeros(0, np.int64)),
        tables.items.rows,
        [table.feature for table in tables.sides],
    )
    (ready,) = agree([given], tables.needs_equal_bags)
    ready = ready.to(model.device)
    sides = None if module.sides is None else module.sides(ready.sides).to_dict()
    return module.head.event_rows(module.items(ready.items).values(), sides, ready), ready


def sample_users(count: int, wanted: int | None, seed: int) -> Ints:
    """A fixed sample of rows, in order."""
    if wanted is None or wanted >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng([seed, 0x5A17]).choice(count, wanted, replace=False))


def evaluation_batches(maker: BatchMaker, batches: Batches, part: Part, max_length: int) -> Iterator[EventBatch]:
    """Each batch, read with all processes watching."""
    for users in batches.users:
        with failing_together("reading users to evaluate"):
            batch = maker.evaluation(users, part, max_length)
        yield batch


def validate(
    model: ShardedModel,
    maker: BatchMaker,
    tables: Tables,
    candidates: Ints,
    metric: Metric,
    users: Ints,
    lengths: Ints,
    max_length: int,
    world: World,
    filter_seen: bool = False,
    moved: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Metrics of the users' validation targets among all candidates, each asked at the target's time.

    A collective; every process gets the result of all. ``moved`` is called whenever some of it is done.
    """
    was_training = model.training
    model.eval()
    try:
        module = model.module
        assert isinstance(module, SequenceModel)
        catalogue = Catalogue(module.items, torch.from_numpy(candidates), tables.items.dim, metric, world)
        metrics = Metrics()
        batches = Batches.of(users, np.minimum(lengths, max_length), world)
        for batch in evaluation_batches(maker, batches, "valid", max_length):
            moved()
            queries = Queries(user_vectors(model, batch, tables), batch.targets[batch.offsets[1:] - 1])
            if filter_seen:  # everything before the target, not only what the encoder is given
                with failing_together("reading whole histories"):
                    whole = maker.evaluation(batch.users.numpy(), "valid", EVERYTHING)
                queries.seen, queries.seen_lengths = whole.items, whole.offsets.diff()
            metrics.add(catalogue.ranks(queries)[0])
        return metrics.result()
    finally:
        model.train(was_training)
