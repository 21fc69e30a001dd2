"""Train a sequence encoder on a prepared dataset.

    torchx run dist.ddp -j 1x2 -m pipelines.train -- --config configs/demo.yaml --run-dir runs/first [key=value ...]

A run directory that exists is resumed. ``python -m fuxi_torchrec.config`` lists the keys.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fuxi_torchrec.api import train
from fuxi_torchrec.logging import get_logger, setup_logging
from fuxi_torchrec.options import add_encoder_option
from pipelines.job import JobParser, run_job


def _parser() -> argparse.ArgumentParser:
    found = JobParser(prog="python -m pipelines.train", description=__doc__.splitlines()[0])
    found.add_argument("--config", help="YAML file of the experiment; by default the run's own, if it exists")
    found.add_argument("--run-dir", required=True, type=Path, help="directory of the run; an existing run is resumed")
    found.add_argument("--init-from", type=Path, metavar="RUN", help="start a new run from another run's weights")
    add_encoder_option(found)
    found.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the config's")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, on as many ranks as torchrun has started."""
    options = _parser().parse_args(arguments)
    from fuxi_torchrec.config import load_config
    from fuxi_torchrec.training.run_directory import CONFIG, RunDirectory

    run = RunDirectory(options.run_dir)
    if options.config is None and (run.path / CONFIG).exists():
        config = run.read_config(options.overrides)
    else:
        config = load_config(options.config, options.overrides)
    setup_logging(config.logging.level)
    summary = train(config, options.run_dir, init_from=options.init_from)
    get_logger(__name__).info(
        "%s: %d steps in %.1f s, %s events/s%s; %s",
        "preempted" if summary["preempted"] else "done",
        summary["step"],
        summary["seconds"],
        f"{summary['events_per_second']:,}",
        f", best {summary['metric']} {summary['best_metric']:.4f}" if summary["best_metric"] is not None else "",
        options.run_dir,
    )
    return 0


if __name__ == "__main__":
    run_job("train", main)
