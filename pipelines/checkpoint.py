"""Look at a run's checkpoints, or write one as plain safetensors.

python -m pipelines.checkpoint list RUN
python -m pipelines.checkpoint unshard RUN OUT [--checkpoint best|latest|STEP]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; exit code 1 and one line if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.checkpoint", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the complete checkpoints of a run")
    listing.add_argument("run", type=Path)
    plain = commands.add_parser("unshard", help="write a checkpoint as safetensors that load without TorchRec")
    plain.add_argument("run", type=Path)
    plain.add_argument("output", type=Path)
    plain.add_argument("--checkpoint", metavar="best|latest|STEP", help="by default the best one, else the latest")
    options = parser.parse_args(arguments)
    try:
        return _list(options.run) if options.command == "list" else _unshard(options)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1


def _list(run: Path) -> int:
    from fuxi_torchrec.training.checkpoint.info import BEST, LATEST, complete, named, read_info
    from fuxi_torchrec.training.run_directory import RunDirectory

    directory = RunDirectory(run).checkpoints
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory: is {run} a run?")
    names = {which: named(directory, which) for which in (LATEST, BEST)}
    for path in complete(directory):
        info = read_info(path)
        marks = " ".join(which for which, found in names.items() if found == path)
        size = sum(size for size, _ in info.files.values()) / 2**20
        metrics = " ".join(f"{name} {info.metrics[name]:.4f}" for name in ("hr@10", "ndcg@10") if info.metrics)
        print(f"{path.name}  {size:9.1f} MiB  {info.world_size} ranks  {marks:12s} {metrics}".rstrip())
    return 0


def _unshard(options: argparse.Namespace) -> int:
    from fuxi_torchrec.training.checkpoint.info import find_checkpoint
    from fuxi_torchrec.training.checkpoint.unshard import unshard
    from fuxi_torchrec.training.run_directory import RunDirectory

    checkpoint = find_checkpoint(RunDirectory(options.run).checkpoints, options.checkpoint)
    weights = unshard(options.run, checkpoint, options.output)
    print(f"{options.output}: {len(weights)} tensors, {sum(w.numel() for w in weights.values()):,} numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
