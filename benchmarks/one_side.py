"""What `benchmarks.against` measures of one checkout, in a process of its own: rates, as a line of JSON.

    python benchmarks/one_side.py encoder|reader|opening SCRATCH
    python benchmarks/one_side.py appends SCRATCH    # a line of rates for each line of its input: two sides take turns

With PYTHONPATH at another checkout it measures that one, as far as it has the names that are imported here.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# name: width, blocks, heads, users, events of each
SHAPES = {
    "d = 64, 86 x 160": (64, 2, 2, 86, 160),
    "d = 128, 8 x 1,024": (128, 4, 4, 8, 1024),
    "d = 256, 4 x 1,024": (256, 2, 4, 4, 1024),
}
CALLERS, APPENDS = 32, 10  # events of each caller in a turn
READ_USERS, OPENED_ITEMS = 40_000, 1_000_000


def encoder(_: Path) -> dict[str, float]:
    """Events a second of forward, and of forward and backward."""
    import torch

    from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder, geometric_periods

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for name, (dim, layers, heads, users, events) in SHAPES.items():
        torch.manual_seed(0)
        periods = geometric_periods(1024, 8, 8)
        encoder = FuXiLinearEncoder(
            FuXiLinearConfig(
                dim=dim, num_layers=layers, num_heads=heads, max_positions=events, temporal_periods=periods
            )
        )
        offsets = torch.arange(users + 1) * events
        times = 1_700_000_000 + torch.randint(20_000, (users, events)).cumsum(1)
        x = (torch.randn(users * events, dim) * 0.1).requires_grad_()
        batch: Any = (offsets, times.flatten(), times[:, -1] + 3600)

        def forward() -> None:
            with torch.no_grad():
                encoder(x, *batch, validate=False)  # noqa: B023

        def both() -> None:
            encoder(x, *batch, validate=False).sum().backward()  # noqa: B023

        for what, function in (("forward", forward), ("forward and backward", both)):
            found[f"encoder, {name}, {what}"] = users * events / fastest(function)
    return found


def appends(scratch: Path) -> dict[str, float]:
    """Events a second that a Recommender has on disk, one a call, by one caller and by many: those of the last turn."""
    from fuxi_torchrec import Recommender
    from fuxi_torchrec.serving.tests.random_export import DemoExport, write_demo_export

    if not (scratch / "appends").exists():
        write_demo_export(scratch / "appends", DemoExport(items=1000, users=CALLERS))
    log = scratch / f"log-{time.time_ns()}"
    with Recommender.load(scratch / "appends", log_dir=log) as recommender:
        first = recommender.manifest.as_of

        def append(user: int, events: int, hour: int) -> None:
            for second in range(events):
                done = recommender.append([user], [1001], [first + 3600 * hour + second])
                assert done.accepted == 1

        def together(hour: int) -> None:
            callers = [threading.Thread(target=append, args=(u, APPENDS, hour)) for u in range(CALLERS)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()

        alone, found = 10 * APPENDS, dict[str, float]()
        print("{}", flush=True)
        for turn, _ in enumerate(sys.stdin, 1):
            found["appends, one caller"] = alone / seconds(lambda: append(0, alone, 2 * turn))  # noqa: B023
            found[f"appends, {CALLERS} callers"] = CALLERS * APPENDS / seconds(lambda: together(2 * turn + 1))  # noqa: B023
            print(json.dumps(found), flush=True)
        return found


def reader(scratch: Path) -> dict[str, float]:
    """Events a second of one epoch of training batches in one process."""
    import numpy as np

    from fuxi_torchrec.data.batches import BatchMaker, Items
    from fuxi_torchrec.data.dataset import Dataset
    from fuxi_torchrec.data.loader import Loader
    from fuxi_torchrec.data.prepare import prepare_synthetic
    from fuxi_torchrec.data.reader import Reader
    from fuxi_torchrec.data.schedule import Plan, Position
    from fuxi_torchrec.data.splits import LeaveOneOut
    from fuxi_torchrec.data.synthetic import SyntheticConfig

    if not (scratch / "reader").exists():
        config = SyntheticConfig(users=READ_USERS, items=20_000, median_length=60, length_sigma=1.32)
        prepare_synthetic(config, scratch / "reader")
    dataset = Dataset.open(scratch / "reader")
    plan = Plan(max_length=10_000, truncation="windows", batch_events=65_536)

    def epoch() -> int:
        maker = BatchMaker(Reader(dataset), LeaveOneOut(), Items(np.arange(dataset.info.items + 1) > 0, 0.01))
        return sum(batch.events for batch in Loader(maker, plan).epoch(Position()))

    return {"reader, one epoch of batches": epoch() / fastest(epoch, 3)}


def opening(scratch: Path) -> dict[str, float]:
    """Items a second of an export that is opened until it answers, files and caches warm."""
    from fuxi_torchrec import Recommender
    from fuxi_torchrec.serving.tests.random_export import DemoExport, write_demo_export

    if not (scratch / "opening").exists():
        model = {**DemoExport().model, "dim": 64}
        write_demo_export(scratch / "opening", DemoExport(items=OPENED_ITEMS, users=2_000, model=model))

    def load() -> None:
        Recommender.load(scratch / "opening", read_only=True).close()

    return {"opening an export of 1,000,000 items": OPENED_ITEMS / fastest(load, 2)}


def fastest(function: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds of the best of several calls, after one that is not timed."""
    function()
    return min(seconds(function) for _ in range(repeats))


def seconds(function: Callable[[], Any]) -> float:
    """Of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


CASES = {"encoder": encoder, "appends": appends, "reader": reader, "opening": opening}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](Path(sys.argv[2]))))
