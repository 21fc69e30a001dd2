"""Two ranks that train and are killed while a checkpoint is being written, once at each of several moments.

    python -m integration_tests.killed_saves DIRECTORY SETTING...

A run for every moment in ``MOMENTS``, in ``DIRECTORY/MOMENT``. The save of step ``STRUCK`` is held open there while
training goes on to its last step; then both ranks are killed.
"""

import json
import multiprocessing
import os
import shutil
import sys
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fuxi_torchrec.training.checkpoint import info
from fuxi_torchrec.training.checkpoint import store as checkpoint
from integration_tests import runs

EVERY, STRUCK, STEPS = 3, 6, 8
# where the save is held, and the step that a resumed run starts from
MOMENTS = {
    "a file is half written": EVERY,
    "all files are written": EVERY,
    "the description is half written": EVERY,
    "everything is written, the name is not final": EVERY,
    "the name is final, latest is the one before": EVERY,
    "latest has moved, the one before is half removed": STRUCK,
}
LONGEST = 60.0


def settings(data: str) -> list[str]:
    return [
        *(f"data.path={data}", "train.epochs=100", "model.dim=16", f"checkpoint.every_steps={EVERY}"),
        *(f"train.max_steps={STEPS}", "checkpoint.keep_last=1", "distributed.timeout_seconds=60"),
    ]


def patch(run_dir: Path, moment: str) -> None:
    """Hold the save of step STRUCK at a moment."""
    saving = {"step": 0}
    save = checkpoint.Checkpoints.save

    def noted(self, state, info, best, group=None):
        saving["step"] = info.progress.step
        return save(self, state, info, best, group)

    def hold(here: str) -> None:
        if here == moment and saving["step"] == STRUCK and dist.get_rank() == 0:
            (run_dir / "held").touch()
            time.sleep(LONGEST)

    class Writer(checkpoint.FileSystemWriter):
        def write_data(self, plan, planner):
            written = super().write_data(plan, planner)
            written.wait()
            if moment == "a file is half written" and saving["step"] == STRUCK:
                file = next(Path(self.path).glob(f"__{dist.get_rank()}_*"))
                os.truncate(file, file.stat().st_size // 2)
            hold("a file is half written")
            return written

    checksums, write_atomically, rmtree = (
        checkpoint.Checkpoints._checksums,
        info.write_atomically,
        shutil.rmtree,
    )

    def held_checksums(self, partial, group):
        hold("all files are written")
        return checksums(self, partial, group)

    def held_write(path: Path, text: str) -> None:
        if path.name == info.INFO:
            path.with_name(f".{path.name}.new").write_text(text[: len(text) // 2])
            hold("the description is half written")
        if path.name == checkpoint.LATEST:
            hold("the name is final, latest is the one before")
        write_atomically(path, text)
        if path.name == info.INFO:
            hold("everything is written, the name is not final")

    def held_rmtree(path, **options):
        if moment.endswith("half removed") and saving["step"] == STRUCK and (Path(path) / info.INFO).exists():
            (Path(path) / info.INFO).unlink()
            hold("latest has moved, the one before is half removed")
        rmtree(path, **options)

    checkpoint.Checkpoints.save, checkpoint.Checkpoints._checksums = noted, held_checksums
    checkpoint.FileSystemWriter, info.write_atomically = Writer, held_write
    checkpoint.shutil = types.SimpleNamespace(**{**vars(shutil), "rmtree": held_rmtree})


def train(rank: int, directory: Path, moment: str, given: list[str]) -> None:
    run_dir = directory / moment
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / f'store of {moment}'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LONGEST),
    )
    patch(run_dir, moment)
    runs.run(run_dir, given)


def steps_of(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONGEST
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def main() -> int:
    directory, given = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")  # TorchRec is imported once
    for moment in MOMENTS:
        run_dir = directory / moment
        processes = [context.Process(target=train, args=(rank, directory, moment, given)) for rank in range(2)]
        for process in processes:
            process.start()
        # held, and training has gone on
        reached = until(lambda run=run_dir: (run / "held").exists() and steps_of(run) == STEPS)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        sys.stdout.write(json.dumps({"moment": moment, "reached": reached}) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    from fuxi_torchrec.training import trainer  # noqa: F401 before forking

    sys.exit(main())
