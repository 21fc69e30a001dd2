"""Each user's rank as a Parquet file: what a paired comparison of two runs, or of a model and a rule, needs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.artifacts import replace_file
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.distributed import raise_on_all_ranks
from fuxi_torchrec.embeddings.inputs import gathered
from fuxi_torchrec.evaluation.ranking import gather_rows
from fuxi_torchrec.events.vocabulary import Vocabulary
from fuxi_torchrec.tasks.rank_metrics import UNRANKED

_ABOUT = ("user_id", "item_id", "events")


def rank_column(name: str) -> str:
    """The column of a request time or a rule.

    Example:
        >>> rank_column("target"), rank_column("new items by brand, of everybody")
        ('rank_target', 'rank_new_items_by_brand_of_everybody')
    """
    return "rank_" + "_".join(name.replace(",", "").split())


class UserRanks:
    """Ranks of this rank's users as they come, by name of what ranked them: the names are the same on all ranks."""

    def __init__(self, names: Sequence[str]) -> None:
        self._parts: dict[str, list[Tensor]] = {name: [] for name in (*_ABOUT, *map(rank_column, names))}

    def add_users(self, users: Tensor, targets: Tensor, lengths: Tensor) -> None:
        for name, values in zip(_ABOUT, (users, targets, lengths), strict=True):
            self._parts[name].append(values)

    def add(self, name: str, ranks: Tensor) -> None:
        """Of the users in the order of :meth:`add_users`."""
        self._parts[rank_column(name)].append(ranks)

    def write(self, path: Path, reader: Reader, vocabulary: Vocabulary, cold: NDArray[np.bool_]) -> None:
        """All ranks' users in the dataset's order, written by rank 0: a collective.

        Args:
            cold: (items + 1,) which items have no event in training.
        """
        none = torch.zeros(0, dtype=torch.int64)
        mine = torch.stack([torch.cat([none, *parts]) for parts in self._parts.values()], 1)
        every = gather_rows(mine, gathered(torch.tensor([len(mine)])).flatten().tolist()).numpy()
        with raise_on_all_ranks("writing the ranks"):
            if dist.get_rank():
                return
            found = dict(zip(self._parts, every[np.argsort(every[:, 0])].T, strict=True))
            users, targets, events = (found.pop(name) for name in _ABOUT)
            columns = {
                "user_id": reader.ids_of(users),
                "item_id": pa.array(vocabulary.raw(targets), vocabulary.ids.type),
                "cold": pa.array(cold[targets], mask=targets == 0),
                "events": pa.array(events),
            }
            columns |= {name: pa.array(ranks, mask=ranks == UNRANKED) for name, ranks in found.items()}
            with replace_file(path) as aside:
                pq.write_table(pa.table(columns), aside)
