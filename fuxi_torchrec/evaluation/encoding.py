"""Users of a dataset to vectors, on all ranks: the one way in which validation, evaluation and export encode."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.distributed import World
from fuxi_torchrec.embeddings.inputs import NO_LOOKUPS, Lookups, agree, make_input
from fuxi_torchrec.embeddings.pipeline import ShardedModel
from fuxi_torchrec.embeddings.tables import Tables
from fuxi_torchrec.encoders.state import States
from fuxi_torchrec.evaluation.partition import UserPartition
from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.tasks.base import Targets
from fuxi_torchrec.training.model import SequenceModel

_EVENTS = 2**15  # events of a batch on a rank
_STATE_BYTES = 2**27  # of a batch's states, about


@dataclass(frozen=True)
class UserEncoder:
    """A sharded model that encodes users."""

    model: ShardedModel  # as it is trained, or as it was loaded
    tables: Tables  # as they are sharded
    world: World
    lookups: Lookups = NO_LOOKUPS  # features of items and users

    @property
    def module(self) -> SequenceModel:
        module = self.model.module
        assert isinstance(module, SequenceModel)
        return module

    def partition(self, users: Ints, events: Ints) -> UserPartition:
        """Users, rows in order, partitioned over ranks and into batches whose events and states are bounded."""
        most = max(1, _STATE_BYTES // max(1, self.module.encoder.state_bytes))
        return UserPartition.of(users, events, self.world.size, _EVENTS, most)

    @torch.no_grad()
    def states(self, batch: EventBatch) -> tuple[States, Tensor | None]:
        """The users of a batch after their events, and what their features add to their queries: a collective."""
        given = make_input(batch, Targets.none(), self.tables, self.lookups)
        (ready,) = agree([given], self.tables.needs_equal_bags)
        ready = ready.to(self.model.device)
        encoder, (rows, user_rows) = self.module.encoder, self.module.event_rows(ready)
        start = encoder.init_state(len(batch))
        return encoder.append(start, rows, ready.offsets, ready.timestamps, validate=False), user_rows

    def query(self, state: States, user_rows: Tensor | None, times: Tensor) -> Tensor:
        """(B, D) users at a time: the encoder's output, and what their features add."""
        found = self.module.encoder.query(state, times.to(self.model.device))
        return found if user_rows is None else found + user_rows

    @torch.no_grad()
    def vectors(self, batch: EventBatch, request_times: Sequence[Tensor]) -> list[Tensor]:
        """(B, D) the users of a batch at each of several request times, their events read once: a collective."""
        state, user_rows = self.states(batch)
        return [self.query(state, user_rows, times) for times in request_times]
