"""The trained model: tables, encoder, task."""

import contextlib

import torch
from torch import Tensor, nn

from fuxi_torchrec.config import Config
from fuxi_torchrec.embeddings.inputs import ModelInput
from fuxi_torchrec.embeddings.rows import FeatureCollection, FeatureRows, ItemLookup, pooled
from fuxi_torchrec.embeddings.tables import Tables, collection
from fuxi_torchrec.encoders import make_encoder
from fuxi_torchrec.encoders.base import SequenceEncoder
from fuxi_torchrec.tasks.base import Task
from fuxi_torchrec.tasks.registry import make_task


class SequenceModel(nn.Module):
    """Lookup, then everything else: TorchRec's pipelines trace this forward and overlap the lookups with the rest."""

    def __init__(self, config: Config, tables: Tables) -> None:
        super().__init__()
        self.items = collection((tables.items,))
        self.features = collection(tables.features) if tables.features else None
        self.item_features = collection(tables.of_items) if tables.of_items else None
        self.user_features = collection(tables.of_users) if tables.of_users else None
        self.head = Head(config, tables)

    def forward(self, batch: ModelInput) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to differentiate, and the task's report: weighted sums over positions."""
        return self.head(*self._lookup(batch), batch)

    def event_rows(self, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """(T, D) rows of the events as the encoder takes them; and (B, D) what is added to the users' queries."""
        items, features, of_items, of_users = self._lookup(batch)
        item_rows = self.head.item_rows(items, of_items, batch)
        return self.head.event_rows(item_rows, features, batch), self.head.user_rows(of_users, batch)

    def _lookup(self, batch: ModelInput) -> tuple[Tensor, FeatureRows | None, FeatureRows | None, FeatureRows | None]:
        features = None if self.features is None else self.features(batch.features).to_dict()
        of_items = None if self.item_features is None else self.item_features(batch.item_features).to_dict()
        of_users = None if self.user_features is None else self.user_features(batch.user_features).to_dict()
        return self.items(batch.items).values(), features, of_items, of_users

    @property
    def encoder(self) -> SequenceEncoder:
        return self.head.encoder

    @property
    def task(self) -> Task:
        return self.head.task

    def item_lookup(self) -> ItemLookup:
        """Rows of items as the task compares them, by id: its boundary for those who have no batch."""
        head = self.head
        return ItemLookup(self.items, FeatureCollection(self.item_features, head.item_pooling, head.item_projection))

    def user_lookup(self) -> FeatureCollection:
        """What features of users add to their queries."""
        return FeatureCollection(self.user_features, self.head.user_pooling, self.head.user_projection)


class Head(nn.Module):
    """Everything after the lookup: looked-up rows to the task's report."""

    def __init__(self, config: Config, tables: Tables) -> None:
        super().__init__()
        self.encoder = make_encoder(config.model)
        self.task = make_task(config.task, config.loss, config.model.dim)
        self.pooling = {table.feature: table.pooling for table in tables.features}
        self.item_pooling = {table.feature: table.pooling for table in tables.of_items}
        self.user_pooling = {table.feature: table.pooling for table in tables.of_users}
        std, dim = config.tables.init_std, config.model.dim
        self.event_projection = _projection(tables.event_inputs, dim, std)
        self.item_projection = _projection(tables.item_inputs, dim, std)
        self.user_projection = _projection(tables.user_inputs, dim, std)
        self.autocast = config.train.precision == "bfloat16"

    def forward(
        self,
        id_rows: Tensor,
        feature_rows: FeatureRows | None,
        item_feature_rows: FeatureRows | None,
        user_feature_rows: FeatureRows | None,
        batch: ModelInput,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        item_rows = self.item_rows(id_rows, item_feature_rows, batch)
        outputs_TD = self.encode(self.event_rows(item_rows, feature_rows, batch), batch)
        positions = batch.targets.positions
        queries_PD = outputs_TD.index_select(0, positions)
        user_rows_BD = self.user_rows(user_feature_rows, batch)
        if user_rows_BD is not None:
            owner = torch.bucketize(positions, batch.offsets[1:].to(positions.device), right=True)
            queries_PD = queries_PD + user_rows_BD.index_select(0, owner)
        report = self.task(queries_PD, item_rows, batch.targets)
        return report["loss"] * batch.loss_scale, {name: value.detach() for name, value in report.items()}

    def item_rows(self, id_rows: Tensor, feature_rows: FeatureRows | None, batch: ModelInput) -> Tensor:
        """(U, D) rows of the items: their own, and their features'."""
        more = pooled(feature_rows, batch.item_features, self.item_pooling, batch.item_numbers, self.item_projection)
        return id_rows if more is None else id_rows[: len(more)] + more

    def user_rows(self, feature_rows: FeatureRows | None, batch: ModelInput) -> Tensor | None:
        """(B, D) rows of the users' features, which are added to their queries."""
        more = pooled(feature_rows, batch.user_features, self.user_pooling, batch.user_numbers, self.user_projection)
        return None if more is None else more[: len(batch.offsets) - 1]

    def event_rows(self, item_rows: Tensor, feature_rows: FeatureRows | None, batch: ModelInput) -> Tensor:
        """(T, D) the item's row plus those of the features."""
        rows_TD = item_rows.index_select(0, batch.input_rows)
        if self.event_projection is not None:
            rows_TD = rows_TD + self.event_projection(batch.event_numbers)
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


def _projection(inputs: int, dim: int, std: float) -> nn.Linear | None:
    """Numbers and vectors to rows; begins as tables do."""
    if not inputs:
        return None
    projection = nn.Linear(inputs, dim, bias=False)
    nn.init.normal_(projection.weight, std=std)
    return projection
