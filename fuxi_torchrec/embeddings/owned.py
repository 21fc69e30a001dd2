"""Features of items and of users as the tables take them: bags of row ids, and inputs of a projection."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fuxi_torchrec.config import Config
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.embeddings.bags import bags
from fuxi_torchrec.embeddings.tables import chosen_features
from fuxi_torchrec.events.feature_table import FeatureTable
from fuxi_torchrec.events.features import Owner
from fuxi_torchrec.events.hashing import mix
from fuxi_torchrec.events.histories import Ints


@dataclass(frozen=True, eq=False)
class FeatureLookup:
    """Features of all items, or of all users, of a run.

    Attributes:
        table: of the model's features; row 0 is of nobody.
        trained: which items have rows of their own in the item table; None of users.
        dropout: share of items whose own row is left out in a step of training.
        seed: decides which.
    """

    table: FeatureTable
    trained: NDArray[np.bool_] | None = None
    dropout: float = 0.0
    seed: int = 0

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which have features or a row of their own; row 0 has not."""
        return self.table.filled if self.trained is None else self.table.filled | self.trained

    def rows_of(self, ids: Ints, step: tuple[int, int] | None) -> Ints:
        """Rows of the item table: the item's own, or row 0 where it was not trained, or is left out of a step.

        An item is left out of a whole step, on all ranks: epoch and step decide, not who looks it up.
        """
        assert self.trained is not None
        own = self.trained[ids]
        if step is not None and self.dropout:
            draw = mix(self.seed, *step, ids.astype(np.uint64), _ID_DROPOUT)
            own = own & ~((draw < np.uint64(self.dropout * 2.0**64)) & self.table.filled[ids])
        return np.where(own, ids, 0)

    def inputs(self, rows: Ints) -> tuple[KeyedJaggedTensor | None, Tensor | None]:
        """Bags of features in tables, and inputs of the projection, of some rows; None where there are none."""
        chosen = self.table.take(rows)
        names = list(chosen.values)
        found = bags(names, [chosen.bags(name) for name in names]) if names else None
        return found, torch.from_numpy(chosen.inputs()) if chosen.numbers else None


_ID_DROPOUT = 0x1D  # keeps these draws apart from others of the same seed


def lookup_of(
    config: Config, dataset: Dataset, owner: Owner, trained: NDArray[np.bool_] | None = None
) -> FeatureLookup | None:
    """What a configuration reads of a dataset's items or users; None if it reads nothing."""
    if not config.features.of(owner):
        return None
    table = dataset.features_of(owner).select(chosen_features(config, dataset.info, owner))
    return FeatureLookup(table, trained, config.features.id_dropout if owner == "item" else 0.0, config.seed)
