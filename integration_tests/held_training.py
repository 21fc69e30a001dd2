"""`pipelines.train` that waits at a step until a test lets it go on, so that a test can strike in mid-training.

    torchx run dist.ddp -m integration_tests.held_training -- --run-dir RUN ...

With a file ``RUN/hold`` that names a step, every rank that stands there writes ``RUN/held/RANK`` and waits until
``RUN/hold`` is gone or it is preempted. ``RUN/raise`` and ``RUN/stuck`` name steps at which rank 1 raises, or
stands still for good.
"""

import json
import os
import sys
import time
from pathlib import Path

from pipelines import train
from pipelines.job import run_job

LONGEST = 90.0  # seconds: a test that failed leaves nothing behind


def patch() -> None:
    """Put the waiting before every step."""
    from fuxi_torchrec.training.steps import StepRunner

    train_step = StepRunner.train

    def held(self):
        run = self.run
        if number(run.directory.path / "raise") == run.progress.step and run.world.rank == 1:
            raise ValueError("rank 1 was told to fail")
        if number(run.directory.path / "stuck") == run.progress.step and run.world.rank == 1:
            stand_still()
        hold = run.directory.path / "hold"
        if number(hold) == run.progress.step:
            (hold.parent / "held").mkdir(exist_ok=True)
            about = {"pid": os.getpid(), "agent": os.getppid(), "world": run.world.size}
            aside = hold.parent / "held" / f".{run.world.rank}"
            aside.write_text(json.dumps(about))
            aside.rename(aside.with_name(str(run.world.rank)))
            deadline = time.monotonic() + LONGEST
            while hold.exists() and not run.stop.requested and time.monotonic() < deadline:
                time.sleep(0.02)
        return train_step(self)

    StepRunner.train = held


def stand_still() -> None:
    time.sleep(LONGEST)


def number(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() else None


def main() -> int:
    patch()
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    run_job("train", main)
