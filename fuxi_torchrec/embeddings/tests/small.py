"""Small models, batches and sharded copies of them, for tests on the ranks of a worker group."""

import logging
import warnings
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from fuxi_torchrec.config import Config, LossConfig, OptimizerConfig
from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.distributed import World
from fuxi_torchrec.embeddings.inputs import make_input, padded
from fuxi_torchrec.embeddings.sharding import is_sharded, like_weight, local_parts, shard, table_states
from fuxi_torchrec.embeddings.tables import Table, Tables, collection
from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig
from fuxi_torchrec.events.histories import Ragged, bounds_of
from fuxi_torchrec.tasks.next_item import compared
from fuxi_torchrec.tasks.samplers import Candidates
from fuxi_torchrec.training.model import SequenceModel

DIM = 8
ITEMS = 23
ACTIONS, TAGS = 7, 11
FEATURES = ["action", "tags"]
# sequences of each rank: one has none
SEQUENCES = (5, 0, 3, 1)


def here():
    """This rank in the worker group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, rank, torch.device("cpu"), size)


def small_tables(sharding, dim=DIM, rows=(ITEMS, ACTIONS, TAGS)):
    """Items and two features; one kind of sharding for all, or one for each."""
    items, action, tags = [sharding] * 3 if isinstance(sharding, str) else sharding
    return Tables(
        Table("item_table", "item", rows[0], dim, items),
        (
            Table("feature_action", "action", rows[1], dim, action),
            Table("feature_tags", "tags", rows[2], dim, tags, "mean"),
        ),
    )


def small_config(optimizer=None, **loss):
    return Config(
        model=FuXiLinearConfig(
            dim=DIM, num_layers=1, num_heads=2, max_positions=16, temporal_periods=(60, 3600), kernel_dim=4
        ),
        loss=LossConfig(**loss),
        optimizer=optimizer or OptimizerConfig(),
    )


def random_batch(sequences, seed, longest=6, items=ITEMS, actions=ACTIONS, tags=TAGS):
    """Histories with an unknown item here and there, targets of weight 0, events without tags or with several."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, longest + 1, sequences)
    events = int(lengths.sum())
    times = 1_600_000_000 + np.sort(draw.integers(0, 10_000, events))  # in order over all of them, and so in each
    targets = draw.integers(0, items, events)
    weights = np.where(targets > 0, draw.choice([0.0, 1.0, 2.5], events), 0.0)
    tag_lengths = draw.integers(0, 4, events)
    return EventBatch(
        items=torch.from_numpy(draw.integers(0, items, events)),
        targets=torch.from_numpy(targets),
        target_weights=torch.from_numpy(weights.astype(np.float32)),
        timestamps=torch.from_numpy(times),
        request_timestamps=torch.full((sequences,), 1_600_020_000),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)),
        users=torch.arange(sequences),
        features={
            "action": draw.integers(0, actions, events),
            "tags": Ragged(draw.integers(0, tags, int(tag_lengths.sum())), bounds_of(tag_lengths)),
        },
    )


def input_of(rank, pool="shared", seed=0, sequences=SEQUENCES, tables=None):
    """The input of any rank, so that each knows those of all."""
    tables = tables or small_tables("row_wise")
    rows = [table.rows for table in tables.all]
    batch = random_batch(sequences[rank], [seed, rank], items=rows[0], actions=rows[1], tags=rows[2])
    positions = int((batch.target_weights > 0).sum())
    draw = np.random.default_rng([seed, 99])
    if pool == "shared":
        ids = np.sort(draw.choice(np.arange(1, rows[0]), 6, replace=False))
        candidates = Candidates(ids, draw.normal(size=6).astype(np.float32))
    else:
        candidates = Candidates(draw.integers(1, rows[0], (positions, 3)))
    return make_input(batch, targets_of(batch, candidates), tables)


def targets_of(batch, candidates):
    """All targets of a batch, compared with candidates."""
    positions = batch.target_weights.nonzero().squeeze(1)
    return compared(batch, positions, batch.target_weights[positions], candidates)


def full_tables(tables, seed=5):
    """Values of all rows of all tables."""
    generator = torch.Generator().manual_seed(seed)
    return {table.name: torch.randn(table.rows, table.dim, generator=generator) for table in tables.all}


def slice_of(part, whole):
    """What of a whole table, or of something like it, a rank holds."""
    rows, columns = part.tensor.shape
    return whole[part.first_row : part.first_row + rows, part.first_column : part.first_column + columns]


def whole_model(config, tables, values):
    """The model on one rank without TorchRec's sharding."""
    torch.manual_seed(1)
    model = SequenceModel(config, tables)
    model.items = collection((tables.items,), "cpu")
    model.features = collection(tables.features, "cpu")
    for name, weight in table_weights(model).items():
        weight.data.copy_(values[name])
    return model


def table_weights(model):
    """Of an unsharded model: weights by table."""
    return {n.split(".")[-2]: p for n, p in model.named_parameters() if ".embedding_bags." in n}


def sharded_model(config, tables, values):
    """The same model, sharded."""
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.manual_seed(1)
    model, plan = shard(SequenceModel(config, tables), tables, config.optimizer, here())
    for part in local_parts(model):
        with torch.no_grad():
            part.tensor.copy_(slice_of(part, values[part.table]))
    return model, plan


def global_loss(model, inputs):
    """The weighted mean over the positions of all ranks, of an unsharded model."""
    weight = sum(float(each.targets.weights.sum()) for each in inputs)
    return sum(model(replace(not_empty(each), loss_scale=1.0 / weight))[0] for each in inputs)


def not_empty(given):
    """With an empty bag more: unsharded collections do not take batches without any."""
    items, features = given.items, given.features
    return replace(
        given, items=padded(items, len(items.lengths()) + 1), features=padded(features, len(given.input_rows) + 1)
    )


def local_values(model, values):
    """Values by parameter name to {(table, first row, first column): value of the part}."""
    found = {}
    for name, weight in table_states(model).items():
        like = like_weight(weight, values.get(name))
        table = name.split(".")[-2]
        if is_sharded(like):
            found |= {(table, *shard.metadata.shard_offsets): shard.tensor for shard in like.local_shards()}
        else:
            found[table, 0, 0] = like
    return found


def gradients(model):
    """By parameter name; parameters of which this rank holds nothing are left out."""
    return {name: p.grad for name, p in model.named_parameters() if p.numel()}
