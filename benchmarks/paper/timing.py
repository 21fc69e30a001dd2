"""What a training step costs in processor time, measured by a short training of its own.

    python -m benchmarks.paper.timing CONFIG RUN_DIR STEPS [key=value ...]

Trains some steps, and then STEPS more in the same process; prints JSON. Processor time, so that a busy machine is fair.
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
    for until in (_FEW, 2 * _FEW, 3 * _FEW + steps):  # the first start loads what all need
        began = time.process_time()
        train(config, run_dir, overrides=[*settings, f"train.max_steps={until}", "train.epochs=10000"])
        spent.append(time.process_time() - began)
    return (spent[2] - spent[1]) / steps


if __name__ == "__main__":
    file, directory, count, *more = sys.argv[1:]
    print(json.dumps({"seconds_per_step": per_step(file, Path(directory), int(count), more)}))
