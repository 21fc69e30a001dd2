"""Plot how a run went: loss and validation over steps.

python -m pipelines.curve RUN [--output curve.png]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the plot; exit code 1 and one line if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.curve", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, help="by default RUN/curve.png")
    options = parser.parse_args(arguments)
    output = options.output or options.run / "curve.png"
    try:
        entries = [json.loads(line) for line in (options.run / "metrics.jsonl").read_text().splitlines()]
    except OSError as error:
        print(f"{options.run}: no metrics here: {error.strerror}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"{options.run}/metrics.jsonl: a line is no JSON: {error}", file=sys.stderr)
        return 1
    draw(entries, options.run.name, output)
    print(output)
    return 0


def draw(entries: Sequence[dict[str, Any]], title: str, output: Path) -> None:
    """Loss on the left axis, validation on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, left = plt.subplots(figsize=(8, 4.5), layout="constrained")
    losses = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    validations = [(entry["step"], entry["validation"]) for entry in entries if "validation" in entry]
    if losses:
        left.plot(*zip(*losses, strict=True), color="tab:gray", linewidth=1, label="training loss")
    left.set(xlabel="step", ylabel="loss", title=title)
    if validations:
        right = left.twinx()
        steps = [step for step, _ in validations]
        for name, color in (("hr@10", "tab:blue"), ("ndcg@10", "tab:orange")):
            right.plot(steps, [metrics[name] for _, metrics in validations], "o-", color=color, label=name)
        right.set_ylabel("validation")
        right.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)  # below the axes: nothing is hidden behind it
    figure.savefig(output, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
