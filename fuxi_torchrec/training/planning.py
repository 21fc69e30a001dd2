"""What a run would need on machines that are not here: memory of a rank, and what it sends in a step.

Counted in float32; with bfloat16 activations take less. The formulas stand beside measurements in
benchmarks/RESULTS.md (``python -m benchmarks.planning``).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from fuxi_torchrec.config import Config
from fuxi_torchrec.data.dataset import DatasetInfo
from fuxi_torchrec.embeddings.rows import rows_at_once
from fuxi_torchrec.embeddings.sharding import Placement, make_plan, placements, planned
from fuxi_torchrec.embeddings.tables import Table, Tables, make_tables, tables_for
from fuxi_torchrec.tasks.registry import make_task
from fuxi_torchrec.training.errors import TrainingError
from fuxi_torchrec.training.model import SequenceModel
from fuxi_torchrec.training.run_data import DEFAULT_EVENTS

GB = 10**9
FLOAT, INT = 4, 8
_OF_ITEMS = "item_"  # names of the item table and of those of items' features begin so
USABLE = 0.9  # of the memory: allocators and communication need the rest
_LIBRARIES = {"cpu": 0.55 * GB, "cuda": 1.0 * GB}  # bytes; a CUDA context and NCCL by their usual size


@dataclass(frozen=True)
class Cluster:
    """Machines by description."""

    nodes: int
    per_node: int  # ranks on each, one a device
    device: str  # "cpu" or "cuda"
    memory: int  # bytes of a rank's device, or its share of the host

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Estimate:
    """What the busiest rank needs."""

    memory: dict[str, int]  # bytes on its device, by what for
    host: int  # bytes of host memory beside it, for a checkpoint's copy
    sent: dict[str, int]  # bytes sent in a step, by what for
    events: int  # of a micro-batch
    lookups: int  # rows it asks for at once
    parts: list[Placement]  # of the tables, who holds what

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    def fits(self, cluster: Cluster) -> bool:
        return self.total <= USABLE * cluster.memory


def described_tables(config: Config, items: int, features: dict[str, int]) -> Tables:
    """Tables of a catalogue of which only the size is known; ``features`` gives rows of some features' tables."""
    return make_tables(config, items, {name: features.get(name, 1000) for name in config.features.event})


def events_of_a_rank(config: Config, ranks: int) -> int:
    """Events that a rank trains at once: a sequence is never split."""
    batch = config.batch
    if batch.users is not None:
        share = -(-batch.users // ranks) * batch.max_length
    else:
        share = -(-(batch.events or DEFAULT_EVENTS) // ranks)
    if batch.max_events_per_rank is not None:
        share = min(share, batch.max_events_per_rank)
    return max(share, batch.max_length)


def lookups_of_a_rank(config: Config, items: int, events: int) -> int:
    """Distinct items that a rank looks up, at most: inputs and targets are the same but one a sequence."""
    sequences = -(-events // config.batch.max_length)
    return min(
        items + 1, events + sequences + make_task(config.task, config.loss, config.model.dim).lookups(events, items)
    )


def estimate(config: Config, tables: Tables, cluster: Cluster, cap: bool = False) -> Estimate:
    """Plan with TorchRec and add everything up; a ShardingError if there is no plan.

    With ``cap`` TorchRec refuses what by its own estimate does not fit into the cluster's memory.
    """
    ranks, model = cluster.ranks, SequenceModel(config, tables)
    memory = cluster.memory if cap else 2**60
    plan = make_plan(model, tables, config.optimizer, ranks, cluster.per_node, cluster.device, memory)
    parts, tables = placements(plan, tables), planned(plan, tables)
    encoder = sum(p.numel() for p in model.head.parameters())
    events = events_of_a_rank(config, ranks)
    lookups = lookups_of_a_rank(config, tables.items.rows - 1, events)
    bags = {table.name: lookups if table.name.startswith(_OF_ITEMS) else events for table in tables.all}
    held, rows = _held(parts, ranks)
    moments = 2 * held if config.optimizer.kind == "adamw" else rows
    step = _step_memory(config, tables, model, ranks, events)
    # a validation holds the catalogue once more, when what belongs to a step is gone
    share = -(-tables.items.rows // ranks) + ranks * rows_at_once(ranks)
    validation = FLOAT * config.model.dim * share if config.validation.every_epochs is not None else 0
    found = {
        **_lasting_memory(config, tables, encoder, held, rows),
        **step,
        "validation, beyond a step's own": max(0, validation - sum(step.values())),
        "libraries": int(_LIBRARIES[cluster.device]),
    }
    copy = FLOAT * (held + moments + 3 * encoder) if config.checkpoint.async_save else 0
    if cluster.device == "cpu":
        found["copy for checkpoints in the background"], copy = copy, 0
    sent = {"encoder's gradients, all-reduce": _all_reduce(encoder, ranks)}
    for table in tables.all:
        sent |= {f"{table.name}: {what}": n for what, n in _lookup_bytes(table, bags[table.name], ranks).items()}
    return Estimate(found, copy, sent, events, lookups, parts)


def _lasting_memory(config: Config, tables: Tables, encoder: int, held: int, rows: int) -> dict[str, int]:
    """Bytes of a rank that holds so many elements and rows of the tables, beside the encoder's elements."""
    adamw = config.optimizer.kind == "adamw"
    replicated = sum(t.rows * t.dim for t in tables.all if t.sharding == "data_parallel")
    return {
        "tables": FLOAT * held,
        "tables' gradients": FLOAT * (held if adamw else replicated),
        "tables' optimizer": FLOAT * (2 * held if adamw else rows),
        "encoder, its gradients and moments": FLOAT * 4 * encoder,
    }


def _step_memory(config: Config, tables: Tables, model: SequenceModel, ranks: int, events: int) -> dict[str, int]:
    """Bytes of a step in which a rank trains so many events at once."""
    dim, lookups = config.model.dim, lookups_of_a_rank(config, tables.items.rows - 1, events)
    bags = {table.name: lookups if table.name.startswith(_OF_ITEMS) else events for table in tables.all}
    exchanged = sum(ranks * bags[t.name] * t.dim for t in tables.all if t.sharding == "row_wise")
    return {
        "activations": model.head.encoder.activation_bytes(events),
        "looked-up rows, targets, their gradients": FLOAT * dim * (4 * lookups + 8 * events),
        "partial sums of row-wise lookups": FLOAT * exchanged,
        "loss": FLOAT * model.task.loss_elements(lookups, events, dim),
    }


def check_memory(config: Config, info: DatasetInfo, ranks: int, events: int, memory: int) -> None:
    """Refuse a run that cannot fit, with a setting that would, before anything of its size is allocated.

    Args:
        config, info: of the run and its dataset.
        ranks: of the job.
        events: that a rank trains at once, at most.
        memory: bytes of a rank's device, or its share of the host's.
    """

    def sketch(changed: Config) -> tuple[SequenceModel, Tables, int]:
        tables = tables_for(changed, info)
        with torch.device("meta"):
            model = SequenceModel(changed, tables)
        encoder = sum(p.numel() for p in model.head.parameters())
        shares = [(t, 1 if t.sharding == "data_parallel" else ranks) for t in tables.all]
        held, rows = sum(t.rows * t.dim // n for t, n in shares), sum(t.rows // n for t, n in shares)
        return model, tables, sum(_lasting_memory(changed, tables, encoder, held, rows).values())

    has = f"a rank has {memory / GB:.1f} GB here"
    model, tables, lasting = sketch(config)
    if lasting > memory:
        fitting = [setting for key in _SIZES if (setting := _fitting(config, key, lambda c: sketch(c)[2] < memory / 2))]
        advice = f"; {' or '.join(fitting)} would fit" if fitting else ": take more ranks, or more memory"
        raise TrainingError(f"tables, encoder and their optimizer take {lasting / GB:,.1f} GB a rank, {has}{advice}")
    step = sum(_step_memory(config, tables, model, ranks, events).values())
    if lasting + step > memory:
        fewer = max(1, int(0.8 * events * (memory - lasting) / step))  # a step has parts that do not shrink
        keys = {"max_events_per_rank": fewer, "events": fewer * ranks}
        if fewer < min(events, config.batch.max_length):
            keys = {"max_length": fewer}
        elif config.optimizer.kind != "adamw":
            del keys["max_events_per_rank"]
        advice = " or ".join(f"batch.{key}={value}" for key, value in keys.items())
        raise TrainingError(
            f"a step of {events:,} events takes {step / GB:,.1f} GB a rank, {has} and {lasting / GB:,.1f} GB of it are "
            f"tables, encoder and their optimizer: {advice} would fit"
        )


_SIZES = ("dim", "max_positions", "num_layers", "ffn_dim", "kernel_dim")  # of encoders, where they have them


def _fitting(config: Config, key: str, fits: Callable[[Config], bool]) -> str | None:
    """The setting of a model's size, halved until it fits."""
    value = getattr(config.model, key, None) or 0
    while value > 1:
        value //= 2
        smaller: dict[str, Any] = {key: value}
        try:
            if fits(dataclasses.replace(config, model=dataclasses.replace(config.model, **smaller))):
                return f"model.{key}={value}"
        except ValueError:  # not a multiple of what it must be
            return None
    return None


def _held(parts: list[Placement], ranks: int) -> tuple[int, int]:
    """Elements, and rows, of the rank that holds most."""
    elements, rows = Counter(dict.fromkeys(range(ranks), 0)), Counter[int]()
    for part in parts:
        for rank in range(ranks) if part.rank is None else (part.rank,):
            elements[rank] += part.rows * part.columns
            rows[rank] += part.rows
    most = max(elements, key=lambda rank: elements[rank])
    return elements[most], rows[most]


def _all_reduce(elements: int, ranks: int) -> int:
    return 2 * FLOAT * elements * (ranks - 1) // ranks


def _lookup_bytes(table: Table, bags: int, ranks: int) -> dict[str, int]:
    """What the busiest rank sends for a table's lookups in a step."""
    others = ranks - 1
    if not others:
        return {}
    one, all_others = FLOAT * bags * table.dim, FLOAT * bags * table.dim * others  # the rows, sent once or to everybody
    if table.sharding == "data_parallel":
        return {"gradients, all-reduce": _all_reduce(table.rows * table.dim, ranks)}
    if table.sharding == "row_wise":
        ids = INT * bags * others // ranks + INT * bags * others  # ids to their owners, lengths to everybody
        return {"ids, all-to-all": ids, "rows, reduce-scatter": all_others, "rows' gradients, all-gather": all_others}
    owner = table.sharding == "table_wise"  # holds the whole table, and is the busiest
    return {
        "ids, all-to-all": 2 * INT * bags * (1 if owner else others),
        "rows, all-to-all": all_others if owner else all_others // ranks,
        "rows' gradients, all-to-all": one if owner else all_others // ranks,
    }


def changes_that_fit(
    config: Config, items: int, features: dict[str, int], cluster: Cluster
) -> dict[tuple[str, ...], int]:
    """Single settings under which the run fits, or pairs of them where no single one is enough; and bytes with them."""
    found: dict[tuple[str, ...], int] = {}
    options = _options(config, cluster)
    pairs = [(a, b) for a, b in combinations(options, 2) if a.partition("=")[0] != b.partition("=")[0]]
    for names in [*((name,) for name in options), *pairs]:
        if len(names) == 2 and any(len(known) == 1 for known in found):
            break
        try:
            changed, machines = _changed(config, cluster, {k: v for name in names for k, v in options[name].items()})
            tables = described_tables(changed, items, features)
            result = estimate(changed, tables, machines)
            estimate(changed, tables, machines, cap=True)  # TorchRec's own opinion
        except ValueError:  # a combination that the configuration or the sharding refuses
            continue
        if result.fits(machines):
            found[names] = result.total
    return found


def _changed(config: Config, cluster: Cluster, settings: dict[str, Any]) -> tuple[Config, Cluster]:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    machines = dataclasses.replace(cluster, **sections.pop("", {}))
    own = {section: dataclasses.replace(getattr(config, section), **values) for section, values in sections.items()}
    return dataclasses.replace(config, **own), machines


def _options(config: Config, cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Changes worth a try, by what a person would type: settings of the configuration, or of the cluster."""
    batch, model = config.batch, config.model
    found: dict[str, dict[str, Any]] = {}
    if config.tables.sharding != "row_wise":
        found["tables.sharding=row_wise"] = {"tables.sharding": "row_wise"}
    if config.optimizer.kind == "adamw":
        given = {
            "optimizer.clip_norm": config.optimizer.clip_norm,
            "batch.max_events_per_rank": batch.max_events_per_rank,
        }
        without = [key.partition(".")[2] for key, value in given.items() if value is not None]
        note = f" without {' and '.join(without)}" if without else ""
        found[f"optimizer.kind=rowwise_adagrad{note}"] = {"optimizer.kind": "rowwise_adagrad"} | dict.fromkeys(given)
    if config.loss.sampler.grows:
        found["loss.negatives=shared"] = {"loss.negatives": "shared", "loss.num_negatives": 1024}
    if config.validation.every_epochs is not None:
        found["validation.every_epochs=null"] = {"validation.every_epochs": None}
    if getattr(model, "activation_checkpointing", True) is False:  # an encoder that can, and does not
        found["model.activation_checkpointing=true"] = {"model.activation_checkpointing": True}
    if config.optimizer.kind == "adamw" and batch.max_events_per_rank is None:
        found[f"batch.max_events_per_rank={batch.max_length}"] = {"batch.max_events_per_rank": batch.max_length}
    if batch.max_length >= 2048:
        half = batch.max_length // 2
        found[f"batch.max_length={half}"] = {"batch.max_length": half}
    if model.dim % 32 == 0:
        found[f"model.dim={model.dim // 2}"] = {"model.dim": model.dim // 2}
    for times in (2, 4, 8):
        found[f"--nodes {cluster.nodes * times}"] = {"nodes": cluster.nodes * times}
    return found
