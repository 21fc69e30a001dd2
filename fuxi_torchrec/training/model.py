"""The trained model: tables, encoder, task."""

import contextlib

import torch
from torch import Tensor, nn

from fuxi_torchrec.config import Config
from fuxi_torchrec.embeddings.inputs import ModelInput
from fuxi_torchrec.embeddings.tables import Table, Tables, collection
from fuxi_torchrec.encoders import make_encoder
from fuxi_torchrec.encoders.base import SequenceEncoder
from fuxi_torchrec.tasks.base import Task
from fuxi_torchrec.tasks.registry import make_task

# rows by feature: sharded tables come in an order of their own
FeatureRows = dict[str, Tensor]


class SequenceModel(nn.Module):
    """Lookup, then everything else: TorchRec's pipelines trace this forward and overlap the lookups with the rest."""

    def __init__(self, config: Config, tables: Tables) -> None:
        super().__init__()
        self.items = collection((tables.items,))
        self.features = collection(tables.features) if tables.features else None
        self.head = Head(config, tables.features)

    def forward(self, batch: ModelInput) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to differentiate, and the task's report: weighted sums over positions."""
        item_rows, feature_rows = self._lookup(batch)
        return self.head(item_rows, feature_rows, batch)

    def event_rows(self, batch: ModelInput) -> Tensor:
        """(T, D) rows of the events as the encoder takes them."""
        item_rows, feature_rows = self._lookup(batch)
        return self.head.event_rows(item_rows, feature_rows, batch)

    def _lookup(self, batch: ModelInput) -> tuple[Tensor, FeatureRows | None]:
        feature_rows = None if self.features is None else self.features(batch.features).to_dict()
        return self.items(batch.items).values(), feature_rows

    @property
    def encoder(self) -> SequenceEncoder:
        return self.head.encoder

    @property
    def task(self) -> Task:
        return self.head.task


class Head(nn.Module):
    """Everything after the lookup: looked-up rows to the task's report."""

    def __init__(self, config: Config, features: tuple[Table, ...]) -> None:
        super().__init__()
        self.encoder = make_encoder(config.model)
        self.task = make_task(config.task, config.loss, config.model.dim)
        self.pooling = {table.feature: table.pooling for table in features}
        self.autocast = config.train.precision == "bfloat16"

    def forward(
        self, item_rows: Tensor, feature_rows: FeatureRows | None, batch: ModelInput
    ) -> tuple[Tensor, dict[str, Tensor]]:
        outputs_TD = self.encode(self.event_rows(item_rows, feature_rows, batch), batch)
        report = self.task(outputs_TD.index_select(0, batch.targets.positions), item_rows, batch.targets)
        return report["loss"] * batch.loss_scale, {name: value.detach() for name, value in report.items()}

    def event_rows(self, item_rows: Tensor, feature_rows: FeatureRows | None, batch: ModelInput) -> Tensor:
        """(T, D) the item's row plus those of the features."""
        rows_TD = item_rows.index_select(0, batch.input_rows)
        if feature_rows is None:
            return rows_TD
        assert batch.features is not None
        events = len(rows_TD)
        lengths = batch.features.lengths().view(len(self.pooling), -1)[:, :events]
        for (name, pooling), lengths_T in zip(self.pooling.items(), lengths, strict=True):
            feature_TD = feature_rows[name][:events]
            rows_TD = rows_TD + (feature_TD / lengths_T.clamp(min=1).unsqueeze(1) if pooling == "mean" else feature_TD)
        return rows_TD

    def encode(self, rows_TD: Tensor, batch: ModelInput) -> Tensor:
        mixed = torch.autocast(rows_TD.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with mixed:
            # values are not checked: the loss says on all ranks, not on one, if something is not finite
            outputs: Tensor = self.encoder(
                rows_TD, batch.offsets, batch.timestamps, batch.request_timestamps, validate=False
            )
        return outputs.float() if self.autocast else outputs
