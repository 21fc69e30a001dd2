"""Show what a trained encoder has learned; of FuXi-Linear its temporal scales, decays and positional kernel.

    python -m pipelines.explain --run-dir RUN [--checkpoint best|latest|STEP] [--output RUN/explain.png]

Prints a table per block and draws it. Nothing but the checkpoint is read: no dataset, one process.
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
        encoder, per_second, name = read(options.run_dir, options.checkpoint)
        found = encoder.explain(per_second)
        if found is None:
            print(f"an encoder of kind {encoder.config.kind} has nothing to show")
            return 0
        print(found.text())
        found.draw(f"{options.run_dir.name}, {name}", output)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


def read(run: Path, which: str | None) -> "tuple[SequenceEncoder, int, str]":
    """The encoder of a run's checkpoint, the ticks of a second, and the checkpoint's name."""
    from fuxi_torchrec.encoders import make_encoder
    from fuxi_torchrec.training.checkpoint.info import find_checkpoint
    from fuxi_torchrec.training.checkpoint.unshard import read_plain
    from fuxi_torchrec.training.run_directory import RunDirectory

    directory = RunDirectory(run)
    config = directory.read_config()
    checkpoint = find_checkpoint(directory.checkpoints, which)
    weights = read_plain(checkpoint, "encoder.")
    encoder = make_encoder(config.model)
    encoder.load_state_dict({name.removeprefix("encoder."): value for name, value in weights.items()})
    return encoder, PER_SECOND[config.data.time_unit], checkpoint.name


if __name__ == "__main__":
    sys.exit(main())
