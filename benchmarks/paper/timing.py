"""What a training step costs in processor time, measured by a short training of its own.

    python -m benchmarks.paper.timing CONFIG RUN_DIR STEPS [key=value ...]

Trains a few steps, and then STEPS more than that, in one process; prints JSON. Processor time: a busy machine is fair.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fuxi_torchrec.api import train

_FEW = 4


def per_step(config: str, run_dir: Path, steps: int, settings: Sequence[str]) -> float:
    """Processor seconds of a step: two starts that differ in nothing but the number of their steps."""
    spent = []
    for number, until in enumerate((_FEW, _FEW, _FEW + steps)):  # the first start loads what all need
        began = time.process_time()
        train(config, run_dir / str(number), overrides=[*settings, f"train.max_steps={until}"])
        spent.append(time.process_time() - began)
    return (spent[2] - spent[1]) / steps


if __name__ == "__main__":
    file, directory, count, *more = sys.argv[1:]
    print(json.dumps({"seconds_per_step": per_step(file, Path(directory), int(count), more)}))
