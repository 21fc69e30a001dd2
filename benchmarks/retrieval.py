"""Retrieval: memory and speed of exact evaluation on sharded tables, memory of an export.

    python -m benchmarks.retrieval [--only evaluation,export] [--items 1000000]

Exit code 1 if a figure that must be reached is missed.
"""

import argparse
import gc
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks import harness
from benchmarks.harness import Aim
from benchmarks.training import make_trainer
from fuxi_torchrec.data.writer import DatasetWriter
from fuxi_torchrec.events.log import LogSpec
from fuxi_torchrec.worker_group import WorkerGroup

DIM = 64
MEMORY_AIM, SCORING_AIM, EXPORT_AIM = 0.6, 0.6, 1.0
USERS = 512  # ranked at once, on all ranks together
SETTINGS = [
    *(f"model.dim={DIM}", "model.num_layers=2", "model.num_heads=2", "model.max_positions=512"),
    "model.temporal_periods=[3600, 86400, 604800, 31536000]",
    *("optimizer.kind=rowwise_adagrad", "train.max_steps=1", "batch.events=4096", "batch.max_length=512"),
    *("logging.tensorboard=false", "validation.every_epochs=null", "logging.level=warning", "loss.num_negatives=512"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, publish it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retrieval", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="evaluation,export")
    parser.add_argument("--items", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sections: dict[str, harness.Section] = {
        "evaluation": partial(evaluation, items=options.items),
        "export": partial(export, items=options.items),
    }
    return harness.run_sections("retrieval", sections, options.only.split(","), "One thread a process.")


def trained(scratch: Path, items: int) -> Path:
    """A run with a checkpoint, made on first use."""
    if not (scratch / "run").exists():
        dataset(scratch / "set", items)
        with WorkerGroup(1, timeout_seconds=900) as group:
            group.run(train, scratch / "run", [f"data.path={scratch / 'set'}", *SETTINGS])
    return scratch / "run"


def dataset(path: Path, items: int) -> None:
    """Every item once in the training split, 500 a user."""
    draw = np.random.default_rng(0)
    users, length = -(-items // 500), 502
    with DatasetWriter(path, LogSpec(), {"benchmark": True}) as out:
        order = np.resize(draw.permutation(items), users * 500).reshape(users, 500) + 1
        for begin in range(0, users, 256):
            part = order[begin : begin + 256]
            history = np.concatenate([part, part[:, :2]], axis=1)  # two more, for validation and test
            ids = np.repeat(np.arange(begin, begin + len(part)), length)
            times = np.tile(1_600_000_000 + 3600 * np.arange(length), len(part))
            columns = {"user_id": ids, "item": history.reshape(-1).astype(np.int32), "timestamp": times}
            out.write(pa.table(columns))
        index = np.arange(1, items + 1, dtype=np.int32)
        table = pa.table({"item_id": index.astype(np.int64), "index": index, "count": np.ones(items, np.int64)})
        out.write_table("items.parquet", table)
        out.finish(items, {}, frozenset())


def train(run_dir: Path, settings: list[str]) -> int:
    """A checkpoint to load."""
    trainer = make_trainer(run_dir, settings)
    trainer.train()
    step: int = trainer.progress.step
    return step


def load(run_dir: Path) -> Any:
    """The run in this worker group."""
    import torch.distributed as dist

    from fuxi_torchrec.distributed import World
    from fuxi_torchrec.evaluation import loading

    size = dist.get_world_size()
    return loading.load(run_dir, World(dist.get_rank(), size, dist.get_rank(), torch.device("cpu"), size))


# --- exact evaluation ------------------------------------------------------------------------------------------------


def evaluation(scratch: Path, items: int) -> tuple[str, list[Aim], Any]:
    """Memory and speed on one and on two ranks."""
    found = {}
    for processes in (1, 2):
        with WorkerGroup(processes, timeout_seconds=900) as group:
            found[processes] = group.run(scored, trained(scratch, items))
    rows = []
    for processes, ranks in found.items():
        worst = max(ranks, key=lambda each: each["resident"])
        slowest = min(ranks, key=lambda each: each["share"])
        cells = [f"{worst['tables'] / 1e6:.0f}", f"{worst['resident'] / 1e6:.0f}"]
        cells += [f"{slowest['gflops']:.1f}", f"{slowest['peak']:.1f}", f"{slowest['share']:.2f}"]
        rows.append([processes, *cells, f"{slowest['filtered']:.2f}"])
    head = ["processes", "tables, MB", "memory taken, MB", "scoring, GFLOP/s", "sgemm, GFLOP/s", "share", "filtered"]
    what = (
        f"Exact ranks of {USERS} users among {items:,} items, d = {DIM}, each process with its part of the item table "
        "and of the catalogue. *tables*: their bytes on a process; *memory taken*: growth of its resident memory from "
        "before the checkpoint is read until it can rank, everything included. Scoring is all that "
        "`ShardedCatalogue.ranks` does, exchange and counting included; *filtered* leaves 500 seen items out of each "
        "user's candidates. Per rank, the slowest, against a 2048 x 2048 product measured in turn; the middle of 7 "
        "rounds."
    )
    ratio = max(each["tables"] for each in found[2]) / max(each["tables"] for each in found[1])
    aims = [
        Aim("memory of tables on 2 processes over 1, per process", ratio, MEMORY_AIM, at_most=True),
        *(
            Aim(f"scoring over sgemm, {n} process(es)", min(each["share"] for each in ranks), SCORING_AIM)
            for n, ranks in found.items()
        ),
    ]
    return f"{what}\n\n{harness.table(head, rows)}", aims, {str(n): ranks for n, ranks in found.items()}


def scored(run_dir: Path) -> dict[str, float]:
    """Memory until a catalogue stands, and the speed of ranking."""
    import torch.distributed as dist

    from fuxi_torchrec.embeddings.sharding import local_parts
    from fuxi_torchrec.evaluation import loading  # noqa: F401  # before anything is measured
    from fuxi_torchrec.evaluation.ranking import Queries, ShardedCatalogue

    before = harness.resident_bytes()
    run = load(run_dir)
    ids = torch.from_numpy(run.items.ids)
    catalogue = ShardedCatalogue(run.module.items, ids, DIM, "cosine", run.world)
    gc.collect()
    taken = harness.resident_bytes() - before
    tables = sum(part.tensor.nbytes for part in local_parts(run.model)) + catalogue.rows_ND.nbytes

    own = USERS // run.world.size
    draw = torch.Generator().manual_seed(run.world.rank)
    targets = ids[torch.randint(len(ids), (own,), generator=draw)]
    plain = Queries(torch.randn(own, DIM, generator=draw), targets)
    seen = ids[torch.randint(len(ids), (own * 500,), generator=draw)]
    filtered = Queries(plain.vectors, targets, seen, torch.full((own,), 500))
    a = torch.randn(2048, 2048)

    def peak() -> None:
        for _ in range(4):
            a @ a

    def together(function: Callable[[], Any]) -> None:
        dist.barrier()  # both ranks measure the same thing at the same time
        function()

    functions: list[Callable[[], Any]] = [peak, partial(catalogue.ranks, plain), partial(catalogue.ranks, filtered)]
    # a round is one moment of the machine: shares are taken within rounds, and the middle one counts
    rounds = np.array([harness.compare([partial(together, each) for each in functions], 1) for _ in range(7)])
    work = 2 * USERS * len(catalogue.ids) * DIM
    speed = np.array([4 * 2 * 2048**3, work, work]) / rounds
    return {
        "tables": tables,
        "resident": taken,
        "peak": float(np.median(speed[:, 0])) / 1e9,
        "gflops": float(np.median(speed[:, 1])) / 1e9,
        "share": float(np.median(speed[:, 1] / speed[:, 0])),
        "filtered": float(np.median(speed[:, 2] / speed[:, 0])),
    }


# --- export ----------------------------------------------------------------------------------------------------------


def export(scratch: Path, items: int) -> tuple[str, list[Aim], Any]:
    """Peak memory of an export on two ranks."""
    rows, raw = [], {}
    worst = 0.0
    for name, exact in (("flat", items), ("hnsw", 0)):
        with WorkerGroup(2, timeout_seconds=1800) as group:
            ranks = group.run(exported, trained(scratch, items), scratch / f"out-{name}", exact)
        extra = [each["extra"] / 1e9 for each in ranks]
        raw[name] = ranks
        worst = max(worst, *extra)
        about, seconds = ranks[0]["index"], max(each["seconds"] for each in ranks)
        size = sum(each.stat().st_size for each in (scratch / f"out-{name}").rglob("*") if each.is_file())
        cells = [f"{seconds:.0f}", *(f"{each:.2f}" for each in extra), f"{size / 1e9:.2f}"]
        rows.append([name, *cells, f"{about['recall@100']:.3f}", f"{about['int8']['recall@100']:.3f}"])
        shutil.rmtree(scratch / f"out-{name}")
    head = ["index", "seconds", "process 0, GB", "process 1, GB", "on disk, GB", "recall@100", "int8 recall@100"]
    what = (
        f"An export of {items:,} items, d = {DIM}, and {-(-items // 500):,} users of 502 events by 2 processes: "
        "resident memory of each process at its peak, above what it held when the model was loaded. The item vectors "
        "are random, the hardest case for an approximate index."
    )
    aim = Aim("GB above the loaded model, the worst process of an export", worst, EXPORT_AIM, at_most=True)
    return f"{what}\n\n{harness.table(head, rows)}", [aim], raw


def exported(run_dir: Path, output: Path, exact_items: int) -> dict[str, Any]:
    """An export and its peak memory."""
    from fuxi_torchrec.export.export import export as run_it
    from fuxi_torchrec.export.options import ExportOptions

    run = load(run_dir)
    gc.collect()
    harness.forget_peak()
    before, began = harness.resident_bytes(), time.perf_counter()
    options = ExportOptions(state_min_events=400, exact_items=exact_items, quantize="int8")
    manifest = run_it(run, output, options)
    seconds = time.perf_counter() - began
    return {"extra": harness.resident_bytes(peak=True) - before, "seconds": seconds, "index": manifest.index}


if __name__ == "__main__":
    sys.exit(main())
