"""The trained model: tables, encoder, loss."""

import contextlib

import torch
from torch import Tensor, nn

from fuxi_torchrec.config import Config, LossConfig
from fuxi_torchrec.embeddings.inputs import ModelInput
from fuxi_torchrec.embeddings.tables import Table, Tables, collection
from fuxi_torchrec.encoders import make_encoder
from fuxi_torchrec.tasks.softmax import candidate_softmax, position_softmax, scaled_items, scaled_queries

# rows by side feature: divided tables come in an order of their own
SideRows = dict[str, Tensor]


class SequenceModel(nn.Module):
    """Lookup, then everything else: TorchRec's pipelines trace this forward and overlap the lookups with the rest."""

    def __init__(self, config: Config, tables: Tables) -> None:
        super().__init__()
        self.items = collection((tables.items,))
        self.sides = collection(tables.sides) if tables.sides else None
        self.head = Head(config, tables.sides)

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """The loss to differentiate, and the summed loss to report."""
        sides = None if self.sides is None else self.sides(batch.sides).to_dict()
        return self.head(self.items(batch.items).values(), sides, batch)


class Head(nn.Module):
    """Looked-up rows to the loss."""

    def __init__(self, config: Config, sides: tuple[Table, ...]) -> None:
        super().__init__()
        self.encoder = make_encoder(config.model)
        self.loss: LossConfig = config.loss
        self.pooling = {table.feature: table.pooling for table in sides}
        self.autocast = config.train.precision == "bfloat16"

    def forward(self, item_rows: Tensor, side_rows: SideRows | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """See :class:`SequenceModel`."""
        outputs_TD = self.encode(self.event_rows(item_rows, side_rows, batch), batch)
        queries_PD = outputs_TD.index_select(0, batch.target_positions)
        summed = self.summed_loss(queries_PD, item_rows, batch)
        return summed * batch.loss_scale, summed.detach()

    def event_rows(self, item_rows: Tensor, side_rows: SideRows | None, batch: ModelInput) -> Tensor:
        """(T, D) the item's row plus those of the side features."""
        rows_TD = item_rows.index_select(0, batch.input_rows)
        if side_rows is None:
            return rows_TD
        assert batch.sides is not None
        events = len(rows_TD)
        lengths = batch.sides.lengths().view(len(self.pooling), -1)[:, :events]
        for (name, pooling), lengths_T in zip(self.pooling.items(), lengths, strict=True):
            side_TD = side_rows[name][:events]
            rows_TD = rows_TD + (side_TD / lengths_T.clamp(min=1).unsqueeze(1) if pooling == "mean" else side_TD)
        return rows_TD

    def encode(self, rows_TD: Tensor, batch: ModelInput) -> Tensor:
        """(T, D) the encoder's outputs."""
        mixed = torch.autocast(rows_TD.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with mixed:
            # values are not checked: the loss says on all processes, not on one, if something is not finite
            outputs: Tensor = self.encoder(
                rows_TD, batch.offsets, batch.timestamps, batch.request_timestamps, validate=False
            )
        return outputs.float() if self.autocast else outputs

    def summed_loss(self, outputs_PD: Tensor, item_rows: Tensor, batch: ModelInput) -> Tensor:
        """The weighted sum over positions."""
        queries_PD = scaled_queries(outputs_PD, self.loss.similarity, self.loss.temperature)
        rows_UD = scaled_items(item_rows, self.loss.similarity)
        if batch.target_column is None:
            return position_softmax(queries_PD, batch.target_rows, rows_UD, batch.candidate_rows, batch.target_weights)
        return candidate_softmax(
            queries_PD,
            rows_UD.index_select(0, batch.target_rows),
            rows_UD.index_select(0, batch.candidate_rows),
            batch.candidate_log_weights,
            batch.target_column,
            batch.target_weights,
        )
