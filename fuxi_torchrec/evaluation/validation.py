"""Exact metrics of held-out targets."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.data.batches import BatchMaker, EventBatch
from fuxi_torchrec.distributed import World, raise_on_all_ranks
from fuxi_torchrec.embeddings.inputs import Candidates, ModelInput, agree, make_input
from fuxi_torchrec.embeddings.pipeline import ShardedModel
from fuxi_torchrec.embeddings.tables import Tables
from fuxi_torchrec.evaluation.ranking import Catalogue, Metrics, Queries
from fuxi_torchrec.evaluation.shares import Shares
from fuxi_torchrec.tasks.softmax import Similarity
from fuxi_torchrec.training.model import SequenceModel

Ints = NDArray[np.int64]

EVERYTHING = 2**62  # events: no history is longer
_EVENTS, _USERS = 2**15, 2**13  # events and users of a batch on a process, at most


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


def sample_users(users: Ints, wanted: int | None, seed: int) -> Ints:
    """A fixed sample of rows, in order."""
    if wanted is None or wanted >= len(users):
        return users
    return users[np.sort(np.random.default_rng([seed, 0x5A17]).choice(len(users), wanted, replace=False))]


def validate(
    model: ShardedModel,
    maker: BatchMaker,
    tables: Tables,
    candidates: Ints,
    similarity: Similarity,
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
        catalogue = Catalogue(module.items, torch.from_numpy(candidates), tables.items.dim, similarity, world)
        metrics = Metrics()
        shares = Shares.of(users, np.minimum(lengths, max_length), world.size, _EVENTS, _USERS)
        for rows in shares.batches[world.rank]:
            moved()
            with raise_on_all_ranks("reading users to evaluate"):
                batch = maker.evaluation(rows, "valid", max_length)
            queries = Queries(user_vectors(model, batch, tables), batch.targets[batch.offsets[1:] - 1])
            if filter_seen:  # everything before the target, not only what the encoder is given
                with raise_on_all_ranks("reading whole histories"):
                    whole = maker.evaluation(batch.users.numpy(), "valid", EVERYTHING)
                queries.seen, queries.seen_lengths = whole.items, whole.offsets.diff()
            metrics.add(catalogue.ranks(queries)[0])
        return metrics.result()
    finally:
        model.train(was_training)
