"""Show what a trained model has learned; of FuXi-Linear its temporal scales, decays and positional kernel.

    python -m pipelines.explain --run-dir RUN [--checkpoint best|latest|STEP] [--output RUN/explain.png]

Prints a table per block and draws it; of a run with task.repeats the bias of items that come back too, into
RUN/explain-repeats.png. Nothing but the checkpoint is read: no dataset, one process.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fuxi_torchrec.events.times import PER_SECOND
from fuxi_torchrec.options import add_encoder_option

if TYPE_CHECKING:  # torch takes seconds to import: not for --help
    from fuxi_torchrec.encoders.base import SequenceEncoder
    from fuxi_torchrec.tasks.base import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and draw; exit code 1 and one line if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.explain", description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", required=True, type=Path, help="directory of the run")
    parser.add_argument("--checkpoint", metavar="best|latest|STEP", help="by default the best one, else the latest")
    parser.add_argument("--output", type=Path, metavar="FILE", help="by default RUN/explain.png")
    add_encoder_option(parser)
    options = parser.parse_args(arguments)
    output = options.output or options.run_dir / "explain.png"
    try:
        encoder, task, per_second, name = read(options.run_dir, options.checkpoint)
        shown = {output: encoder.explain(per_second)}
        shown[output.with_stem(f"{output.stem}-repeats")] = task.explain(per_second)
        if shown[output] is None:
            print(f"an encoder of kind {encoder.config.kind} has nothing to show")
        for file, found in shown.items():
            if found is not None:
                print(found.text())
                found.draw(f"{options.run_dir.name}, {name}", file)
                print(file)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    return 0


def read(run: Path, which: str | None) -> "tuple[SequenceEncoder, Task, int, str]":
    """The encoder and the task of a run's checkpoint, the ticks of a second, and the checkpoint's name."""
    from fuxi_torchrec.encoders import make_encoder
    from fuxi_torchrec.tasks.registry import make_task
    from fuxi_torchrec.training.checkpoint.info import find_checkpoint
    from fuxi_torchrec.training.checkpoint.unshard import read_plain
    from fuxi_torchrec.training.run_directory import RunDirectory

    directory = RunDirectory(run)
    config = directory.read_config()
    checkpoint = find_checkpoint(directory.checkpoints, which)
    encoder, task = make_encoder(config.model), make_task(config.task, config.loss, config.model.dim)
    for prefix, part in (("encoder.", encoder), ("task.", task)):
        weights = read_plain(checkpoint, prefix)
        part.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items()})
    return encoder, task, PER_SECOND[config.data.time_unit], checkpoint.name


if __name__ == "__main__":
    sys.exit(main())
