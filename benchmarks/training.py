"""Training: where a step's time goes, what negatives cost, what a second process gains, memory of long histories.

    python -m benchmarks.training [--only breakdown,negatives,scaling,memory]

Exit code 1 if a figure that must be reached is missed.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Aim
from fuxi_torchrec.config import load_config
from fuxi_torchrec.data.prepare import prepare_synthetic
from fuxi_torchrec.data.synthetic import SyntheticConfig
from fuxi_torchrec.distributed import World
from fuxi_torchrec.worker_group import WorkerGroup

# MovieLens-1M's size: 6,040 users, 3,706 items, a million events
MOVIES = SyntheticConfig(users=6040, items=3700, groups=20, median_length=96, length_sigma=1.05, max_length=2314)
MOVIES_SETTINGS = [
    *("model.dim=64", "model.num_layers=2", "model.num_heads=2", "model.max_positions=200", "model.dropout=0.2"),
    "model.temporal_periods=[1, 16, 256, 4096, 65536, 1048576, 16777216, 268435456]",
    *("batch.users=128", "batch.max_length=200", "loss.negatives=shared", "loss.num_negatives=1024"),
]
LONG = SyntheticConfig(users=512, items=20_000, groups=20, median_length=300, length_sigma=1.6, max_length=16_385)
LONG_SETTINGS = [
    *("model.dim=128", "model.num_layers=4", "model.num_heads=4", "model.max_positions=16384"),
    "model.temporal_periods=[3600, 14400, 86400, 604800, 2592000, 7776000, 31536000, 126144000]",
    *("batch.events=32768", "batch.max_length=16384", "loss.negatives=shared", "loss.num_negatives=1024"),
]
QUIET = [
    *("logging.tensorboard=false", "validation.every_epochs=null", "checkpoint.every_steps=null"),
    *("logging.level=warning", "train.epochs=1000"),
]
OUTSIDE_AIM, NEGATIVES_AIM, SCALING_AIM, MEMORY_AIM = 0.25, 5.0, 1.6, 4.0
PARTS = ("reader", "lookup", "encoder", "loss", "backward: encoder", "backward: lookup", "optimizer", "rest")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, publish it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="breakdown,negatives,scaling,memory")
    wanted = parser.parse_args(arguments).only.split(",")
    torch.set_num_threads(1)
    return harness.run_sections("training", SECTIONS, wanted, "One thread a process.")


def dataset(scratch: Path, name: str, config: SyntheticConfig) -> str:
    """The setting that names a synthetic dataset, made on first use."""
    if not (scratch / name).exists():
        prepare_synthetic(config, scratch / name)
    return f"data.path={scratch / name}"


# --- where the time goes ---------------------------------------------------------------------------------------------


def breakdown(scratch: Path) -> tuple[str, list[Aim], Any]:
    """The parts of a step, on one process."""
    rows, aims, raw = [], [], {}
    for name, config, settings, steps in (("movies", MOVIES, MOVIES_SETTINGS, 30), ("long", LONG, LONG_SETTINGS, 5)):
        run = [dataset(scratch, name, config), *settings, *QUIET]
        with WorkerGroup(1, timeout_seconds=900) as group:
            (parts,) = group.run(timed_steps, scratch / f"run-{name}", run, steps)
        total = sum(parts[part] for part in PARTS)
        outside = 1 - (parts["encoder"] + parts["loss"] + parts["backward: encoder"]) / total
        raw[name] = parts
        rows.append([name, f"{parts['events']:.0f}", f"{total * 1e3:.0f}"])
        rows[-1] += [f"{100 * parts[part] / total:.1f} %" for part in PARTS]
        aims.append(Aim(f"{name}: share of the step outside encoder and loss", outside, OUTSIDE_AIM, at_most=True))
    head = ["data", "events a step", "ms a step", *PARTS]
    what = (
        "Where a step's time goes. *movies*: synthetic histories of MovieLens-1M's size, d = 64, L = 2, 128 users of "
        "at most 200 events; *long*: histories to 16,384 events, d = 128, L = 4, 32,768 events a step. Both with 1,024 "
        "shared negatives and AdamW. The loss includes its gradients; *lookup* includes the expansion of deduplicated "
        "rows."
    )
    return f"{what}\n\n{harness.table(head, rows)}", aims, raw


class Clock:
    """Seconds by part; a part that starts ends the one before."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self._current, self._since = "rest", time.perf_counter()

    def switch(self, part: str) -> str:
        """Begin a part; the one that was on."""
        now = time.perf_counter()
        self.parts[self._current] += now - self._since
        before, self._current, self._since = self._current, part, now
        return before

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """A part inside another."""
        before = self.switch(part)
        yield
        self.switch(before)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time is a part's."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.during(part):
                return function(*args, **kwargs)

        return timed

    def at_gradient(self, tensor: Tensor, part: str) -> Tensor:
        """A part that begins when the backward pass reaches a tensor."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.switch(part) and None)
        return tensor


def timed_steps(run_dir: Path, settings: list[str], steps: int) -> dict[str, float]:
    """Seconds of each part of a step, the mean of several after a warm-up."""
    trainer = make_trainer(run_dir, settings)
    runner = trainer.begin()
    clock, head, feed = Clock(), trainer.model.module.head, runner.feed
    read = feed.__next__

    class TimedFeed(Iterator[Any]):
        waiting = feed.waiting

        def __next__(self) -> Any:
            with clock.during("reader"):
                return read()

    encode, rows = head.encode, head.event_rows

    def timed_rows(*args: Any) -> Tensor:
        with clock.during("lookup"):
            return clock.at_gradient(rows(*args), "backward: lookup")

    def timed_encode(given: Tensor, batch: Any) -> Tensor:
        with clock.during("encoder"):
            return clock.at_gradient(encode(given, batch), "backward: encoder")

    head.event_rows, head.encode = timed_rows, timed_encode
    head.task.forward = clock.around("loss", head.task.forward)
    trainer.model.module.items.forward = clock.around("lookup", trainer.model.module.items.forward)
    trainer.optimizer.zero_grad = clock.around("optimizer", trainer.optimizer.zero_grad)
    trainer.optimizer.step = clock.around("optimizer", trainer.optimizer.step)
    runner.pipeline._backward = clock.around("backward: lookup", runner.pipeline._backward)
    runner.feed = TimedFeed()
    events = 0
    for number in range(steps + 3):
        if number == 3:
            clock.switch("rest")
            clock.parts.clear()
            events = 0
        done = runner.train()
        events += done.events
        trainer.progress = replace(trainer.progress, step=trainer.progress.step + 1, position=done.position)
        clock.switch("rest")
    return {**{part: clock.parts[part] / steps for part in PARTS}, "events": events / steps}


# --- what negatives cost ---------------------------------------------------------------------------------------------


def negatives(scratch: Path) -> tuple[str, list[Aim], Any]:
    """The loss step with one pool for all positions against one for each."""
    rows, raw = [], {}
    for name, items, dim in (("MovieLens-1M", 3706, 64), ("KuaiRand-27K", 131_090, 128)):
        steps = [
            LossStep(items, dim, kind, count) for kind, count in (("shared", 1024), ("uniform", 128), ("uniform", 128))
        ]
        steps[2].plain = True
        shared, uniform, plain = harness.compare(steps, repeats=5)
        raw[name] = {"shared": shared, "uniform": uniform, "plain": plain}
        rows.append([name, items, dim, *(f"{t * 1e3:.0f}" for t in (shared, uniform, plain))])
        rows[-1] += [f"{uniform / shared:.1f}", f"{plain / shared:.1f}"]
    head = ["catalogue of", "items", "d", "shared, ms", "uniform, ms", "uniform, plain, ms", "ratio", "ratio to plain"]
    what = (
        f"The loss step of {LossStep.positions:,} positions: drawing negatives, deduplicating, looking rows up, the "
        "loss and its gradients for outputs and looked-up rows, not the table's gradient and update. *shared*: "
        "1,024 for all positions, *uniform*: 128 for each; *plain* is the same with torch's operations and autograd on "
        "positions x negatives x width, as the released code does."
    )
    large = raw["KuaiRand-27K"]
    ratio = large["uniform"] / large["shared"]
    aim = Aim("uniform's loss step over shared's, KuaiRand-27K's catalogue", ratio, NEGATIVES_AIM)
    return f"{what}\n\n{harness.table(head, rows)}", [aim], raw


class LossStep:
    """Everything that negatives cost, called again and again."""

    positions = 16_384

    def __init__(self, items: int, dim: int, kind: str, count: int) -> None:
        from fuxi_torchrec.embeddings.tables import ITEM_TABLE, Table, Tables, collection
        from fuxi_torchrec.tasks.base import ItemSet
        from fuxi_torchrec.tasks.next_item import NextItem
        from fuxi_torchrec.training.feed import StepMaker

        settings = [f"model.dim={dim}", "model.num_layers=1", f"loss.negatives={kind}", f"loss.num_negatives={count}"]
        config = load_config(None, [*settings, "model.use_temporal=false"])
        self.plain, self.dim, self.step = False, dim, 0
        tables = Tables(Table(ITEM_TABLE, "item", items + 1, dim, "row_wise"), ())
        self.table = collection((tables.items,), "cpu")
        self.task = NextItem(config.loss)
        counts = np.concatenate([[0], np.ones(items, np.int64)])
        self.maker = StepMaker(self.task.target_maker(ItemSet(np.arange(1, items + 1), counts), 0), tables)
        self.batch = _batch(items, self.positions)
        self.outputs = torch.randn(self.positions, dim, requires_grad=True)

    def __call__(self) -> None:
        """One loss step."""
        from fuxi_torchrec.data.schedule import Position

        self.step += 1
        given = self.maker(Position(0, self.step), [self.batch]).inputs[0]
        rows = self.table(given.items).values().detach().requires_grad_()
        loss = self._plain(rows, given.targets) if self.plain else self.task(self.outputs, rows, given.targets)["loss"]
        loss.backward()
        self.outputs.grad = None

    def _plain(self, rows_UD: Tensor, targets: Any) -> Tensor:
        from fuxi_torchrec.tasks.softmax import scaled_items, scaled_queries

        queries_PD, rows_UD = scaled_queries(self.outputs, "cosine", 0.05), scaled_items(rows_UD, "cosine")
        own_P, others_PK = targets.items["targets"], targets.items["candidates"]
        positive_P = (queries_PD * rows_UD[own_P]).sum(1)
        negative_PK = torch.einsum("pd,pkd->pk", queries_PD, rows_UD[others_PK])
        own_PK = others_PK == own_P.unsqueeze(1)
        logits = torch.cat([positive_P.unsqueeze(1), negative_PK.masked_fill(own_PK, -torch.inf)], 1)
        return (torch.logsumexp(logits, 1) - positive_P).sum()


def _batch(items: int, events: int) -> Any:
    from fuxi_torchrec.data.batches import EventBatch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, items + 1, (events,), generator=generator)
    zeros = torch.zeros(events, dtype=torch.int64)
    from fuxi_torchrec.data.schedule import Position

    return EventBatch(
        ids, ids.roll(-1), torch.ones(events), zeros, zeros[:1], torch.tensor([0, events]), zeros[:1], end=Position()
    )


# --- a second process ------------------------------------------------------------------------------------------------


def scaling(scratch: Path) -> tuple[str, list[Aim], Any]:
    """Events per second of one and of two ranks of one thread."""
    same = [setting for setting in MOVIES_SETTINGS if not setting.startswith("batch.users")]
    run = [dataset(scratch, "movies", MOVIES), *same, "batch.events=16384", *QUIET]
    speeds: dict[int, list[float]] = {1: [], 2: []}
    groups = {n: WorkerGroup(n, timeout_seconds=900) for n in speeds}
    for turn in range(5):
        for n, group in groups.items():
            speeds[n].append(group.run(speed, scratch / f"scaling-{n}-{turn}", run, 30)[0])
    for group in groups.values():
        group.close()
    one, two = max(speeds[1]), max(speeds[2])
    text = (
        f"A second process: {one:,.0f} events/s on one process of one thread, {two:,.0f} on two, tables row-wise "
        "(*movies* as above but 16,384 events a step, which divide more evenly than 128 users; the best of five turns "
        "of 30 steps each)."
    )
    aim = Aim("events/s of two processes over one", two / one, SCALING_AIM)
    return text, [aim], {str(n): found for n, found in speeds.items()}


def speed(run_dir: Path, settings: list[str], steps: int) -> float:
    """Events per second after a warm-up."""
    trainer = make_trainer(run_dir, settings)
    runner = trainer.begin()
    events, began = 0, 0.0
    for number in range(steps + 3):
        if number == 3:
            events, began = 0, time.perf_counter()
        events += runner.train().events
    trainer.directory.unlock()
    return events / (time.perf_counter() - began)


# --- memory of long histories ----------------------------------------------------------------------------------------


def memory(scratch: Path) -> tuple[str, list[Aim], Any]:
    """Peak memory of a process that trains a history of 16,384 events."""
    config = SyntheticConfig(users=24, items=20_000, median_length=16_400, length_sigma=0.0, max_length=16_400)
    run = [dataset(scratch, "longest", config), *LONG_SETTINGS, *QUIET, "batch.events=16384", "train.max_steps=3"]
    run += ["batch.streams=1"]
    rows, raw = [], {}
    for checkpointing in (False, True):
        extra = f"model.activation_checkpointing={str(checkpointing).lower()}"
        with WorkerGroup(1, timeout_seconds=900) as group:
            (found,) = group.run(peak, scratch / f"peak-{checkpointing}", [*run, extra])
        raw[str(checkpointing)] = found
        rows.append(["yes" if checkpointing else "no", f"{found['events']:.0f}", f"{found['bytes'] / 1e9:.2f}"])
    what = "Peak memory of one process, d = 128, L = 4, one history of 16,384 events a step, everything included."
    table = harness.table(["activation checkpointing", "events a step", "GB"], rows)
    aim = Aim("GB of a process training a 16,384-event history", raw["False"]["bytes"] / 1e9, MEMORY_AIM, at_most=True)
    return f"{what}\n\n{table}", [aim], raw


def peak(run_dir: Path, settings: list[str]) -> dict[str, float]:
    """Peak bytes of a whole run."""
    trainer = make_trainer(run_dir, settings)
    trainer.train()
    longest = int(np.minimum(trainer.loader.lengths - 1, trainer.config.batch.max_length).max())
    return {"bytes": harness.resident_bytes(peak=True), "events": longest}


def make_trainer(run_dir: Path, settings: list[str], config: Path | None = None) -> Any:
    """A trainer in this worker group; a configuration file, then settings."""
    from fuxi_torchrec.evaluation.validation import validate
    from fuxi_torchrec.logging import setup_logging
    from fuxi_torchrec.training.run_directory import RunDirectory
    from fuxi_torchrec.training.trainer import Trainer

    setup_logging("warning")
    size = dist.get_world_size()
    world = World(dist.get_rank(), size, dist.get_rank(), torch.device("cpu"), size)
    return Trainer(load_config(config, settings), RunDirectory(run_dir), world, validate)


SECTIONS: dict[str, harness.Section] = {
    "breakdown": breakdown,
    "negatives": negatives,
    "scaling": scaling,
    "memory": memory,
}

if __name__ == "__main__":
    sys.exit(main())
