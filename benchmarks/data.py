"""Preparing and reading: events per second and memory.

    python -m benchmarks.data [--events N]

Results are checked before any figure is printed. Exit code 1 if a figure that must be reached is missed.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # pyarrow would load it on first use, within the time taken
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import harness
from benchmarks.harness import Aim
from fuxi_torchrec.data.batches import BatchMaker, Items
from fuxi_torchrec.data.dataset import Dataset, histogram
from fuxi_torchrec.data.loader import Loader
from fuxi_torchrec.data.prepare import PrepareOptions, prepare
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.schedule import Plan, Position
from fuxi_torchrec.data.splits import LeaveOneOut
from fuxi_torchrec.data.synthetic import SyntheticConfig, generate
from fuxi_torchrec.data.writer import ROW_GROUP_EVENTS, encoding
from fuxi_torchrec.events import sources

MEMORY_LIMIT = "1GB"
REPEATS = 5
PREPARE_AIM = 5  # times pandas


def write_log(path: Path, events: int) -> dict[str, float]:
    """Events of synthetic users as a log holds them: by time, all users mixed; of MovieLens-20M's mean length, 144."""
    users = events // 100
    start = time.perf_counter()
    parts, made = [], 0
    for block in generate(SyntheticConfig(users=users, items=20_000, median_length=60, length_sigma=1.32)):
        parts.append(block)
        made += len(block.user)
        if made >= events:
            break
    seconds = time.perf_counter() - start
    user, item, when = (
        np.concatenate([getattr(b, name) for b in parts])[:events] for name in ("user", "item", "timestamp")
    )
    order = np.argsort(when, kind="stable")
    action = np.random.default_rng(0).integers(0, 5, len(user), dtype=np.int8)
    table = pa.table({"user": user[order], "item": item[order], "time": when[order], "action": action})
    pq.write_table(table, path, row_group_size=2**20)
    return {"events": len(user), "generated_per_second": made / seconds}


class Clock:
    """Time, CPU time and peak memory of what follows."""

    def __init__(self) -> None:
        harness.forget_peak()
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def stop(self, events: int) -> dict[str, float]:
        """What was needed for some events."""
        seconds, cpu = time.perf_counter() - self.start, time.process_time() - self.cpu
        peak = harness.resident_bytes(peak=True) / 2**20
        return {
            "events": events,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "per_second": events / seconds,
            "peak_mib": peak,
        }


def prepare_case(log: str, output: str) -> dict[str, float]:
    """Prepare a log; run in a process of its own."""
    clock = Clock()
    source = sources.events(log, "user", "item", "time", "s")
    info = prepare(source, output, PrepareOptions(memory_limit=MEMORY_LIMIT))
    return clock.stop(info.events)


def pandas_case(log: str, output: str) -> dict[str, float]:
    """The same work with pandas' groupby, all in memory.

    Rows checked, items by falling count, a stable sort, one row of lists per user in the same types, encoding and size
    of row groups, ``items.parquet``, and what ``dataset.json`` says: counts, histogram, times, fingerprint.
    """
    clock = Clock()
    Path(output).mkdir()
    events = pd.read_parquet(log, columns=["user", "item", "time"])
    if events.isna().any(axis=None) or (events["time"] < 0).any():
        raise ValueError("bad rows")
    items = events["item"].value_counts().rename("count").rename_axis("item_id").reset_index()
    items = items.sort_values(["count", "item_id"], ascending=[False, True], ignore_index=True)
    items.insert(1, "index", np.arange(1, len(items) + 1, dtype=np.int32))
    items.to_parquet(f"{output}/items.parquet", index=False, compression="zstd")
    events["item"] = events["item"].map(items.set_index("item_id")["index"])
    events = events.sort_values(["user", "time"], kind="stable")
    rows = events.groupby("user", sort=True).agg({"item": list, "time": list}).reset_index()
    lengths = rows["item"].str.len().to_numpy()
    schema = pa.schema([("user", pa.int64()), ("item", pa.list_(pa.int32())), ("time", pa.list_(pa.int64()))])
    group = max(1, round(ROW_GROUP_EVENTS / lengths.mean()))
    rows.to_parquet(f"{output}/part.parquet", index=False, schema=schema, row_group_size=group, **encoding(schema))
    digest = hashlib.sha256()
    for column in (rows["user"], lengths, events["item"], events["time"]):
        digest.update(np.ascontiguousarray(column).data)
    times = (int(events["time"].min()), int(events["time"].max()))
    info = {"users": len(rows), "events": len(events), "times": times, "fingerprint": digest.hexdigest()}
    Path(f"{output}/dataset.json").write_text(json.dumps({**info, "lengths": histogram(lengths)}))
    return clock.stop(len(events))


def prepare_wide(log: str, output: str) -> dict[str, float]:
    """Prepare a log with a feature and target weights."""
    target = "CASE action WHEN 0 THEN 0 ELSE 1 END"
    source = sources.events(log, "user", "item", "time", "s", ["action"], target)
    return {"events": prepare(source, output, PrepareOptions(memory_limit=MEMORY_LIMIT)).events}


def read_case(path: str, kind: str) -> dict[str, float]:
    """Training batches of one epoch, in one process; "small cache": of a tenth of the set, all its features."""
    dataset = Dataset.open(path)
    plan = Plan(max_length=10_000, truncation="windows", batch_events=65_536)
    reader = Reader(dataset)
    if kind == "small cache":
        reader = Reader(dataset, [feature.name for feature in dataset.info.features])
        reader.cache_bytes = int(reader.block_bytes().sum()) // 10
        plan = dataclasses.replace(plan, shuffle_blocks=1)
    maker = BatchMaker(reader, LeaveOneOut(), Items(np.arange(dataset.info.items + 1) > 0, 0.01))
    start = time.perf_counter()
    loader = Loader(maker, plan)
    planned = time.perf_counter() - start
    clock = Clock()
    return {"plan_seconds": planned, **clock.stop(sum(batch.events for batch in loader.epoch(Position())))}


def check(log: str, ours: str, theirs: str) -> None:
    """Both ways give the same vocabulary and the same histories, item by item."""
    dataset = Dataset.open(ours)
    mine = pa.concat_tables([pq.read_table(dataset.file(f.name)) for f in dataset.info.files])
    other = pq.read_table(f"{theirs}/part.parquet").rename_columns(["user_id", "item", "timestamp"])
    assert mine.combine_chunks().equals(other.replace_schema_metadata(None).combine_chunks())
    items = [pq.read_table(f"{place}/items.parquet") for place in (ours, theirs)]
    assert items[0].equals(items[1].replace_schema_metadata(None))
    wanted = pd.read_parquet(log).sort_values(["user", "time"], kind="stable")["item"].to_numpy()
    raw = dataset.vocabulary().ids.to_numpy()[mine["item"].combine_chunks().flatten().to_numpy() - 1]
    assert np.array_equal(raw, wanted)
    print("results checked")


def run(events: int, place: Path) -> dict[str, Any]:
    """All cases, one line each as they end."""
    found: dict[str, Any] = {"machine": harness.machine()}

    def case(name: str, result: Any) -> None:
        found[name] = result
        print(f"{name}: {json.dumps(result)}", flush=True)

    small, large = str(place / "small.parquet"), str(place / "large.parquet")
    case("small_log", write_log(place / "small.parquet", events // 10))
    case("large_log", write_log(place / "large.parquet", events))
    child = "benchmarks.data"
    harness.in_child(child, "--prepare", small, str(place / "small"))
    runs: dict[str, list[Any]] = {"pandas": [], "prepare": []}
    for _ in range(REPEATS):
        for name in ("pandas", "set"):
            shutil.rmtree(place / name, ignore_errors=True)
        runs["pandas"].append(harness.in_child(child, "--pandas", small, str(place / "pandas")))
        os.sync()  # what was written before is not to be paid for by this run
        runs["prepare"].append(harness.in_child(child, "--prepare", large, str(place / "set")))
    check(small, str(place / "small"), str(place / "pandas"))
    for name, results in runs.items():
        case(name, min(results, key=lambda result: float(result["seconds"])))
    harness.in_child(child, "--prepare-wide", large, str(place / "wide"))
    case("read", harness.in_child(child, "--read", str(place / "set"), "plain"))
    case("read_small_cache", harness.in_child(child, "--read", str(place / "wide"), "small cache"))
    return found


def report(found: dict[str, Any]) -> str:
    """The section of RESULTS.md."""
    ours, pandas = found["prepare"], found["pandas"]
    names = {
        "prepare": f"`prepare events`, memory limit {MEMORY_LIMIT}",
        "pandas": "pandas: the same with its groupby, in memory",
        "read": "reader: one epoch of training batches, one process",
        "read_small_cache": "the same with a feature, target weights and a cache of a tenth of the set",
    }
    rows = []
    for name, text in names.items():
        case = found[name]
        times = [f"{case['seconds']:.1f}", f"{case['cpu_seconds']:.1f}", f"{case['per_second'] / 1e6:.2f}"]
        rows.append([text, f"{case['events']:,}", *times, f"{case['peak_mib']:,.0f}"])
    return "\n\n".join(
        [
            f"`python -m benchmarks.data`. {found['machine']}.",
            harness.table(["", "events", "seconds", "CPU seconds", "million events/s", "peak memory, MiB"], rows),
            f"Preparing runs at {ours['per_second'] / pandas['per_second']:.1f} times the rate of pandas, which has a "
            f"tenth of the events (the aim is {PREPARE_AIM}); the best of {REPEATS} runs each, taken in turn. "
            "It keeps two cores busy and pandas one: with another program on the machine the ratio is smaller. "
            f"The synthetic generator makes {found['large_log']['generated_per_second'] / 1e6:.1f} million events/s.",
        ]
    )


def main() -> int:
    """Check, measure, write down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=20_000_000, help="fewer: nothing is written down")
    for name in ("prepare", "prepare-wide", "pandas", "read"):
        parser.add_argument(f"--{name}", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prepare or args.prepare_wide or args.pandas or args.read:
        if args.prepare:
            result = prepare_case(*args.prepare)
        elif args.prepare_wide:
            result = prepare_wide(*args.prepare_wide)
        elif args.pandas:
            result = pandas_case(*args.pandas)
        else:
            result = read_case(*args.read)
        print(json.dumps(result))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-data-") as place:
        found = run(args.events, Path(place))
    if args.events >= 20_000_000:
        harness.publish("data", "Data", report(found), found)
    return harness.conclude(
        [
            Aim(
                "prepare against pandas, events/s",
                found["prepare"]["per_second"] / found["pandas"]["per_second"],
                PREPARE_AIM,
            ),
            Aim("peak memory of prepare, GB", found["prepare"]["peak_mib"] * 2**20 / 1e9, 3, at_most=True),
            Aim("reader, million events/s", found["read"]["per_second"] / 1e6, 2),
            Aim("reader with a small cache, million events/s", found["read_small_cache"]["per_second"] / 1e6, 2),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
