"""Look at a run's checkpoints, or write one as plain safetensors.

python -m pipelines.checkpoint list RUN
python -m pipelines.checkpoint unshard RUN OUT [--checkpoint best|latest|STEP]
"""

import argparse
import json
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
    plain.add_argument("--checkpoint", default="latest", metavar="best|latest|STEP")
    options = parser.parse_args(arguments)
    try:
        return _list(options.run) if options.command == "list" else _unshard(options)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1


def find(run: Path, which: str | None) -> Path:
    """A run's checkpoint: ``best``, ``latest`` or a step; None for the best one if there is one, else the latest."""
    directory = run / "checkpoints"
    if which is None:
        which = "best" if (directory / "best").exists() else "latest"
    if which in ("best", "latest"):
        pointer = directory / which
        if not pointer.exists():
            raise ValueError(f"{pointer}: the run has no such checkpoint")
        which = pointer.read_text().strip()
    path = directory / (f"step-{int(which):09d}" if which.isdigit() else which)
    if not (path / "checkpoint.json").exists():
        there = ", ".join(each.parent.name for each in sorted(directory.glob("step-*/checkpoint.json"))) or "none"
        raise ValueError(f"{path}: no complete checkpoint; there are {there}")
    return path


def _list(run: Path) -> int:
    directory = run / "checkpoints"
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory: is {run} a run?")
    names = {which: _read(directory / which) for which in ("latest", "best")}
    for path in sorted(directory.glob("step-*/checkpoint.json")):
        info = json.loads(path.read_text())
        marks = " ".join(which for which, name in names.items() if name == path.parent.name)
        size = sum(size for size, _ in info["files"].values()) / 2**20
        metrics = " ".join(f"{name} {info['metrics'][name]:.4f}" for name in ("hr@10", "ndcg@10") if info["metrics"])
        print(f"{path.parent.name}  {size:9.1f} MiB  {info['world_size']} processes  {marks:12s} {metrics}".rstrip())
    return 0


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _unshard(options: argparse.Namespace) -> int:
    from fuxi_torchrec.training.unshard import unshard

    weights = unshard(options.run, find(options.run, options.checkpoint), options.output)
    print(f"{options.output}: {len(weights)} tensors, {sum(w.numel() for w in weights.values()):,} numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
