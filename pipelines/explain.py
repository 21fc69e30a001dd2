"""Show what a trained encoder has learned: its temporal scales, decays and positional kernel.

    python -m pipelines.explain --run-dir RUN [--checkpoint best|latest|STEP] [--output RUN/explain.png]

Prints a table per block and draws it. Nothing but the checkpoint is read: no dataset, one process.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fuxi_torchrec.encoders.fuxi_linear.learned import LearnedBlock, Scale, learned, readable
from fuxi_torchrec.events.times import PER_SECOND

POSITIONS = 256  # shown of the kernel
FORGOTTEN = 200  # events shown of a retention head's memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and draw; exit code 1 and one line if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.explain", description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", required=True, type=Path, help="directory of the run")
    parser.add_argument("--checkpoint", metavar="best|latest|STEP", help="by default the best one, else the latest")
    parser.add_argument("--output", type=Path, metavar="FILE", help="by default RUN/explain.png")
    options = parser.parse_args(arguments)
    output = options.output or options.run_dir / "explain.png"
    try:
        blocks, per_second, name = read(options.run_dir, options.checkpoint)
        print(as_text(blocks, per_second))
        draw(blocks, per_second, f"{options.run_dir.name}, {name}", output)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


def read(run: Path, which: str | None) -> tuple[list[LearnedBlock], int, str]:
    """What a run's checkpoint has learned, the ticks of a second, and the checkpoint's name."""
    from fuxi_torchrec.encoders.fuxi_linear.encoder import FuXiLinearEncoder
    from fuxi_torchrec.training.checkpoint.info import find_checkpoint
    from fuxi_torchrec.training.checkpoint.unshard import read_plain
    from fuxi_torchrec.training.run_directory import RunDirectory

    directory = RunDirectory(run)
    config = directory.read_config()
    checkpoint = find_checkpoint(directory.checkpoints, which)
    weights = read_plain(checkpoint, "encoder.")
    encoder = FuXiLinearEncoder(config.model)
    encoder.load_state_dict(
        {name.removeprefix("encoder."): value for name, value in weights.items() if name.startswith("encoder.")}
    )
    return learned(encoder, POSITIONS), PER_SECOND[config.data.time_unit], checkpoint.name


def as_text(blocks: Sequence[LearnedBlock], per_second: int) -> str:
    """A table per block."""
    lines = []
    for number, block in enumerate(blocks):
        lines.append(f"block {number}")
        if block.retention is not None:
            lines.append("  retention, left after one event: " + ", ".join(f"{each:.4f}" for each in block.retention))
        if block.kernel_skip is not None:
            lines.append(f"  positional, beside the kernel the event itself: {block.kernel_skip:.3f}")
        if block.scales is not None:
            lines.append(f"  {'period':>10} {'half-life':>10} {'sin':>8} {'cos':>8} {'itself':>15}")
            for scale in block.scales:
                times = f"{readable(scale.period, per_second):>10} {readable(scale.half_life, per_second):>10}"
                itself = f"{scale.sin_skip:.2f} / {scale.cos_skip:.2f}"
                lines.append(f"  {times} {scale.sin:>8.3f} {scale.cos:>8.3f} {itself:>15}")
    return "\n".join(lines)


def draw(blocks: Sequence[LearnedBlock], per_second: int, title: str, output: Path) -> None:
    """A row of panels per block: temporal weights, half-lives, retention, positional kernel; empty if it is off."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(blocks), 4, figsize=(17, 3.6 * len(blocks)), squeeze=False)
    for number, (block, row) in enumerate(zip(blocks, axes, strict=True)):
        if block.scales is not None:
            _draw_weights(row[0], block.scales, per_second)
            _draw_half_lives(row[1], block.scales, per_second)
        if block.retention is not None:
            _draw_retention(row[2], block.retention)
        if block.kernel is not None:
            _draw_kernel(figure, row[3], block.kernel)
        row[0].set_ylabel(f"block {number}\nweight of the past")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)


def _draw_weights(axis: Any, scales: Sequence[Scale], per_second: int) -> None:
    axis.set_title("temporal scales: α of sin and cos")
    places = range(len(scales))
    axis.bar([place - 0.2 for place in places], [scale.sin for scale in scales], 0.4, label="sin")
    axis.bar([place + 0.2 for place in places], [scale.cos for scale in scales], 0.4, label="cos")
    axis.axhline(0, color="black", linewidth=0.5)
    axis.set_xticks(list(places), [readable(scale.period, per_second) for scale in scales], rotation=45)
    axis.legend()


def _draw_half_lives(axis: Any, scales: Sequence[Scale], per_second: int) -> None:
    axis.set_title("temporal scales: half-life against period")
    periods = [scale.period / per_second for scale in scales]
    axis.loglog(periods, periods, ":", color="gray", label="one period")
    axis.loglog(periods, [scale.half_life / per_second for scale in scales], "o")
    axis.set(xlabel="period, s", ylabel="half-life, s")
    axis.legend()


def _draw_retention(axis: Any, decays: Sequence[float]) -> None:
    axis.set_title("retention: what is left of an event")
    for head, decay in enumerate(decays):
        axis.semilogx(range(1, FORGOTTEN), [decay**n for n in range(1, FORGOTTEN)], label=f"head {head}: {decay:.3f}")
    axis.set(xlabel="events later", ylim=(0, 1))
    axis.legend()


def _draw_kernel(figure: Any, axis: Any, kernel: Tensor) -> None:
    axis.set_title("positional kernel: weight of event j at i")
    most = float(kernel.abs().max()) or 1.0
    image = axis.imshow(kernel.numpy(), cmap="RdBu", vmin=-most, vmax=most, interpolation="nearest")
    axis.set(xlabel="j", ylabel="i")
    figure.colorbar(image, ax=axis)


if __name__ == "__main__":
    sys.exit(main())
