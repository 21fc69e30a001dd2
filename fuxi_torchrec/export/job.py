"""What the parts of an export share: the run, the place, the options, the files written so far."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import torch
import torch.distributed as dist

from fuxi_torchrec.embeddings.owned import FeatureLookup
from fuxi_torchrec.evaluation.loading import Loaded
from fuxi_torchrec.events.features import Owner
from fuxi_torchrec.export.bundle import FileEntry, IdType, describe_file
from fuxi_torchrec.export.options import ExportOptions
from fuxi_torchrec.tasks.repeats import RepeatBias, RepeatsConfig
from fuxi_torchrec.tasks.window_state import window_bytes


class ExportJob:
    """An export being written by all ranks.

    Attributes:
        first: whether this is rank 0.
        files: what this rank wrote.
        about: what the task says of scores.
        window: items of a user's window; 0 where scores have no bias.
        record_bytes: of a user's state and window; 0 where none are stored.
        features: of events, in the model's order.
        owned: features of items and of users, likewise.
    """

    def __init__(self, run: Loaded, directory: Path, options: ExportOptions, as_of: int) -> None:
        self.run, self.directory, self.options, self.as_of = run, directory, options, as_of
        self.world, self.first, self.similarity = run.world, run.world.rank == 0, run.config.loss.similarity
        self.files: dict[str, FileEntry] = {}
        self.about = run.module.task.exported()
        self.window = int(self.about.get("repeats", {}).get("window", 0))
        self.record_bytes = run.encoder.state_bytes and run.encoder.state_bytes + window_bytes(self.window)
        about = {feature.name: feature for feature in run.dataset.info.features}
        tables = (replace(about[t.feature], rows=t.rows, pooling=t.pooling) for t in run.tables.features)
        self.features = (*tables, *run.tables.numbers)
        lookups: dict[Owner, FeatureLookup | None] = {"item": run.lookups.items, "user": run.lookups.users}
        self.owned = {owner: () if each is None else each.table.features for owner, each in lookups.items()}

    def bias(self) -> RepeatBias | None:
        """A copy of the bias for items of users' windows, on the host; None if there is none."""
        if not self.window:
            return None
        bias = RepeatBias(RepeatsConfig(**self.about["repeats"]), self.run.config.model.dim)
        weights = self.run.module.task.exported_weights()
        bias.load_state_dict({name: value.detach().cpu() for name, value in weights.items()})
        return bias.eval().requires_grad_(False)

    def wrote(self, *names: str) -> None:
        """Note files of this rank, which are whole."""
        self.files |= {name: describe_file(self.directory / name) for name in names}


def plain_ids(ids: pa.Array) -> pa.Array:
    """As ``int64`` or ``string``."""
    return ids.cast(pa.int64() if pa.types.is_integer(ids.type) else pa.string())


def id_type(kind: pa.DataType) -> IdType:
    """A type of ids in the manifest."""
    return "int64" if pa.types.is_integer(kind) else "string"


def summed(count: int) -> int:
    """Over all ranks: a collective."""
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)
