"""Which rank holds which shard of which table: planned by TorchRec, checked before, shown after."""

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.remote_device import _remote_device
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    KernelConfig,
    ParameterConstraints,
    PlannerError,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ShardingPlan, ShardingType

from fuxi_torchrec.config import OptimizerConfig, Sharding
from fuxi_torchrec.distributed import World, check_same, raise_on_all_ranks
from fuxi_torchrec.embeddings.tables import Table, Tables, owner_of, table_of
from fuxi_torchrec.errors import FuxiError

_ALIGNMENT = 4  # FBGEMM: columns of a shard are a multiple of this


class ShardingError(FuxiError, ValueError):
    """Tables that cannot be sharded as asked."""


class _Sharder(EmbeddingBagCollectionSharder):
    """TorchRec's, which hides row-wise sharding on CPUs though it works there."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return sorted({*super().sharding_types(compute_device_type), ShardingType.ROW_WISE.value})


def check_shardable(tables: Tables, optimizer: OptimizerConfig, world_size: int) -> None:
    """Refuse what TorchRec would refuse on one rank only, or do wrong; needs no process group."""
    for table in tables.all:
        if table.sharding == "row_wise" and _leaves_ranks_empty(table.rows, world_size):
            raise ShardingError(
                f"{_key(table)}: {table.name} has {table.rows} rows, row_wise over {world_size} ranks leaves some "
                f"without any: set {_key(table)}=data_parallel"
            )
        if table.sharding == "column_wise" and table.dim % _ALIGNMENT:
            raise ShardingError(
                f"{_key(table)}: column_wise needs model.dim to be a multiple of {_ALIGNMENT}, not {table.dim}"
            )
        if optimizer.kind == "rowwise_adagrad" and table.dim % _ALIGNMENT:
            raise ShardingError(
                f"optimizer.kind rowwise_adagrad needs model.dim to be a multiple of {_ALIGNMENT}, not {table.dim}"
            )


def _key(table: Table) -> str:
    """The config key that decides a table's sharding."""
    owner = owner_of(table.name)
    return "tables.sharding" if owner is None else f"features.{owner}.{table.feature}.sharding"


def make_plan(
    model: nn.Module,
    tables: Tables,
    optimizer: OptimizerConfig,
    world_size: int,
    local_size: int,
    device_type: str,
    memory_bytes: int | None = None,
) -> ShardingPlan:
    """TorchRec's plan under the constraints of the config; the same on every rank, without talking.

    Args:
        world_size, local_size: ranks, and ranks per host.
        memory_bytes: of a rank's device, or its share of the host for "cpu"; TorchRec's own guess if None.
    """
    check_shardable(tables, optimizer, world_size)
    constraints, dense, fused = {}, EmbeddingComputeKernel.DENSE, EmbeddingComputeKernel.FUSED
    for table in tables.all:
        kinds = choices(table, optimizer, world_size)
        constraints[table.name] = ParameterConstraints(
            sharding_types=list(kinds),
            compute_kernels=sorted({(dense if kind == "data_parallel" else fused).value for kind in kinds}),
            min_partition=_columns(table.dim, world_size) if "column_wise" in kinds else None,
        )
    topology = TopologyFactory.create_topology(
        TrainerConfig(
            world_size=world_size,
            local_world_size=local_size,
            hbm_cap_bytes=memory_bytes if device_type != "cpu" else None,
            ddr_cap_bytes=memory_bytes if device_type == "cpu" else None,
        ),
        kernel_config=KernelConfig(compute_device=device_type),
    )
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    try:
        plan = planner.plan(model, [_sharder(optimizer)])
    except PlannerError as error:
        raise ShardingError(f"TorchRec finds no sharding plan for {world_size} ranks: {error}") from error
    if optimizer.kind == "adamw":
        # the planner accepts the dense kernel for data-parallel tables only, the sharded modules for all of them
        for module in plan.plan.values():
            for sharding in module.values():
                sharding.compute_kernel = dense.value
    return plan


def choices(table: Table, optimizer: OptimizerConfig, world_size: int) -> tuple[Sharding, ...]:
    """The shardings that TorchRec's planner may choose for a table: the one asked for, or with auto all exact ones."""
    if table.sharding != "auto":
        return (table.sharding,)
    found: list[Sharding] = ["table_wise", "data_parallel"]
    if not _leaves_ranks_empty(table.rows, world_size):
        found.append("row_wise")
    if optimizer.kind != "rowwise_adagrad" and table.dim % _ALIGNMENT == 0:
        found.append("column_wise")
    return tuple(found)


def planned(plan: ShardingPlan, tables: Tables) -> Tables:
    """The tables, each with the sharding that the plan gives it."""
    chosen = {placement.table: placement.sharding for placement in placements(plan, tables)}

    def resolved(table: Table) -> Table:
        return dataclasses.replace(table, sharding=cast(Sharding, chosen[table.name]))

    return tables.resolved(resolved)


def _leaves_ranks_empty(rows: int, world_size: int) -> bool:
    """Whether row-wise sharding gives some ranks no row."""
    return -(-rows // world_size) * (world_size - 1) >= rows


def _columns(dim: int, world_size: int) -> int:
    """Columns of a shard so that every rank has some, if the width allows it."""
    wanted = -(-dim // world_size)
    return next(n for n in range(_ALIGNMENT, dim + 1, _ALIGNMENT) if n >= wanted and dim % n == 0)


def _sharder(optimizer: OptimizerConfig) -> _Sharder:
    if optimizer.kind == "adamw":
        return _Sharder()
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return _Sharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": optimizer.lr if optimizer.table_lr is None else optimizer.table_lr,
            "eps": optimizer.eps,
        }
    )


def shard(
    model: nn.Module, tables: Tables, optimizer: OptimizerConfig, world: World
) -> tuple[DistributedModelParallel, ShardingPlan]:
    """The model with its tables sharded and the rest under DDP: a collective, planned on all ranks first."""
    with raise_on_all_ranks("planning the tables' sharding"):
        memory = torch.cuda.get_device_properties(world.device).total_memory if world.device.type == "cuda" else None
        plan = make_plan(model, tables, optimizer, world.size, world.local_size, world.device.type, memory)
    check_same("the tables' sharding plan", str(plan))
    sharded = DistributedModelParallel(
        module=model,
        device=world.device,
        plan=plan,
        sharders=[_sharder(optimizer)],
        # several backward passes per step would not fit a static graph
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    return sharded, plan


@dataclass(frozen=True)
class Placement:
    """A part of a table and the rank that holds it."""

    table: str
    sharding: str
    kernel: str
    rank: int | None  # None: every rank holds it
    first_row: int
    first_column: int
    rows: int
    columns: int


def placements(plan: ShardingPlan, tables: Tables) -> list[Placement]:
    """A plan, part by part."""
    by_name = {table.name: table for table in tables.all}
    found = []
    for module in plan.plan.values():
        for name, sharding in module.items():
            table = by_name[name]
            kind, kernel = sharding.sharding_type, sharding.compute_kernel
            if sharding.sharding_spec is None or kind == ShardingType.DATA_PARALLEL.value:
                found.append(Placement(name, kind, kernel, None, 0, 0, table.rows, table.dim))
                continue
            for part in sharding.sharding_spec.shards:
                (row, column), (rows, columns) = part.shard_offsets, part.shard_sizes
                found.append(Placement(name, kind, kernel, part.placement.rank(), row, column, rows, columns))
    return found


def describe(parts: list[Placement]) -> str:
    """A plan as a table for people, like parts of a table in one line."""
    head = f"{'table':<20} {'sharding':<14} {'kernel':<7} {'ranks':>10}"
    lines = [f"{head} {'rows of a part':>16} {'columns':>8} {'MB':>12}"]
    for table in dict.fromkeys(part.table for part in parts):
        own = [part for part in parts if part.table == table]
        largest = max(own, key=lambda part: part.rows * part.columns)
        holders = "all" if largest.rank is None else str(len({part.rank for part in own}))
        size = largest.rows * largest.columns * 4 / 1e6
        lines.append(
            f"{table:<20} {largest.sharding:<14} {largest.kernel:<7} {holders:>10} {largest.rows:>16,} "
            f"{largest.columns:>8} {size:>12,.1f}"
        )
    return "\n".join(lines)


def plan_to_json(plan: ShardingPlan, tables: Tables, world_size: int) -> str:
    """A plan for the run directory."""
    parts = [vars(placement) for placement in placements(plan, tables)]
    return json.dumps({"world_size": world_size, "placements": parts}, indent=1) + "\n"


# --- the parts a rank holds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalPart:
    """A part of a table on this rank; ``tensor`` is the live weight."""

    table: str
    tensor: Tensor
    first_row: int
    first_column: int


def local_parts(model: DistributedModelParallel) -> Iterator[LocalPart]:
    """What of the tables this rank holds."""
    for name, value in table_states(model).items():
        table = table_of(name)
        assert table is not None
        if isinstance(value, ShardedTensor):
            for part in value.local_shards():
                row, column = part.metadata.shard_offsets
                yield LocalPart(table, part.tensor, row, column)
        else:
            yield LocalPart(table, value, 0, 0)


def table_states(model: DistributedModelParallel) -> dict[str, Any]:
    """The tables' weights by their full names: ShardedTensor, or a plain tensor if data-parallel."""
    return {name: value for name, value in model.state_dict().items() if table_of(name) is not None}


def is_sharded(value: Any) -> bool:
    """Whether every rank holds a part of it only. (A ShardedTensor is a Tensor too.)"""
    return isinstance(value, ShardedTensor)


def like_weight(weight: Any, local: Tensor | None) -> Any:
    """A moment of a table's elements, sharded as the weight is; ``local`` is None where the rank holds nothing of it.

    Without it a checkpoint would take the local tensors, all of one name, for copies of each other.
    """
    if not isinstance(weight, ShardedTensor):
        return local
    parts = weight.local_shards()
    # several columns' parts on one rank are one parameter, one below the other
    pieces = () if local is None else local.split([part.metadata.shard_sizes[0] for part in parts])
    shards = [Shard(piece, part.metadata) for piece, part in zip(pieces, parts, strict=True)]
    return _sharded(weight, shards, weight.metadata())


def copied(value: Any) -> Any:
    """A copy in host memory, sharded as the value is."""
    if not isinstance(value, ShardedTensor):
        return value.detach().to("cpu", copy=True)
    local = [Shard(part.tensor.detach().to("cpu", copy=True), on_host(part.metadata)) for part in value.local_shards()]
    metadata = copy.deepcopy(value.metadata())
    metadata.shards_metadata = [on_host(part) for part in metadata.shards_metadata]
    return _sharded(value, local, metadata)


def on_host(part: ShardMetadata) -> ShardMetadata:
    """A part's description with its place in the memory of the rank's host: torch compares it with the tensor's."""
    assert isinstance(part.placement, _remote_device)
    place = f"rank:{part.placement.rank()}/cpu"
    return ShardMetadata(list(part.shard_offsets), list(part.shard_sizes), place)


def clipped(value: Any, rows: int) -> Any:
    """The first rows of a table or of its moments, sharded as they are; aliases the value."""
    if not isinstance(value, ShardedTensor):
        return value[:rows]
    metadata = copy.deepcopy(value.metadata())
    metadata.size = torch.Size([rows, *metadata.size[1:]])
    metadata.shards_metadata = [clip for part in metadata.shards_metadata if (clip := _clip(part, rows)) is not None]
    local = [
        Shard(part.tensor[: clip.shard_sizes[0]], clip)
        for part in value.local_shards()
        if (clip := _clip(part.metadata, rows)) is not None
    ]
    return _sharded(value, local, metadata)


def _sharded(like: ShardedTensor, shards: list[Shard], metadata: ShardedTensorMetadata) -> ShardedTensor:
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, like._process_group)


def _clip(part: ShardMetadata, rows: int) -> ShardMetadata | None:
    """A shard's description without the rows from ``rows`` on; None if nothing is left."""
    left = min(part.shard_sizes[0], rows - part.shard_offsets[0])
    if left <= 0:
        return None
    return ShardMetadata(list(part.shard_offsets), [left, *part.shard_sizes[1:]], part.placement)


def initialise(model: DistributedModelParallel, std: float, seed: int) -> None:
    """Draw all tables' rows anew: a row's values depend on the seed, the table and the row alone."""
    for part in local_parts(model):
        fill_rows(part.tensor, part.table, part.first_row, part.first_column, std, seed)


_BLOCK = 4096  # rows drawn by one generator


@torch.no_grad()
def fill_rows(tensor: Tensor, table: str, first_row: int, first_column: int, std: float, seed: int) -> None:
    """Rows from ``first_row`` on, columns from ``first_column`` on, of an endless table.

    Values are normal, within two deviations.
    """
    rows, columns = tensor.shape
    tail = 0.5 * math.erfc(2.0 / math.sqrt(2.0))  # of a normal distribution, beyond two deviations
    for block in range(first_row // _BLOCK, -(-(first_row + rows) // _BLOCK)):
        digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        # column by column: a slice of columns does not depend on the table's width
        begin, end = max(first_row, block * _BLOCK), min(first_row + rows, (block + 1) * _BLOCK)
        drawn = torch.rand(first_column + columns, _BLOCK, generator=generator)
        wanted = drawn[first_column:, begin - block * _BLOCK : end - block * _BLOCK].t()
        normal = torch.special.ndtri(tail + wanted.double() * (1.0 - 2.0 * tail)).to(wanted.dtype)
        tensor[begin - first_row : end - first_row].copy_(normal * std)
