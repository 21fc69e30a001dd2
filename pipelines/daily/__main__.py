"""The command line of the production loop."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchx.runner import get_runner
from torchx.schedulers.local_scheduler import SignalException

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.config import load_config
from fuxi_torchrec.logging import setup_logging
from pipelines.daily.config import DailyConfig
from pipelines.daily.jobs import LOCAL, TorchXJobs
from pipelines.daily.loop import FAILED, Daily
from pipelines.daily.state import JOB_LOCK, LOCK, DailyError, locked
from pipelines.daily.status import dry_run, status

_LAST_SECONDS = 15.0  # a job of a pipeline that was killed ends by itself


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.daily",
        description="The production loop: a day's log to a published export, each stage a TorchX job.",
        epilog="exit codes: 0 published or nothing to do, 1 a stage failed, 3 the gate rejected the day",
    )
    parser.add_argument("--config", required=True, help="YAML file; python -m pipelines.daily.config lists the keys")
    parser.add_argument("--scheduler", default="local_cwd", help="local_cwd (default), slurm, kubernetes, ...")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--day", metavar="DAY", help="this day only; by default all that have a log and are not done")
    what.add_argument("--status", action="store_true", help="show every day, and do nothing")
    what.add_argument("--rollback", nargs="?", const=True, metavar="DAY", help="publish DAY again, or what was before")
    what.add_argument("--skip", metavar="DAY", help="leave a day's log out of all later datasets")
    what.add_argument("--unskip", metavar="DAY", help="take the log of a skipped day in again")
    what.add_argument("--redo", metavar="DAY", help="remove what a day that is not published has made, and run it")
    parser.add_argument("--dryrun", action="store_true", help="show the jobs of the next day, and submit none")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the config's")
    found = parser.parse_args(arguments)
    if found.dryrun and (found.status or (found.skip, found.unskip, found.rollback) != (None, None, None)):
        parser.error("--dryrun shows jobs: it goes with --day, --redo or nothing")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is due; the exit codes are those of the epilog."""
    options = _options(arguments)
    setup_logging("warning")
    try:
        config = strict_yaml.load(DailyConfig, options.config, options.overrides)
        with get_runner() as runner:
            known = runner.scheduler_backends()
            if options.scheduler not in known:
                raise DailyError(f"--scheduler {options.scheduler}: one of {', '.join(known)}")
            root = Path(config.root).absolute()
            jobs = TorchXJobs(runner, options.scheduler, config.jobs, root)
            daily = Daily(config, jobs)
            if options.status:
                print(status(daily))
                return 0
            if options.rollback is not None:
                old, new = daily.releases.roll_back(None if options.rollback is True else options.rollback)
                print(f"day {new} is published, day {old} is not any more")
                return 0
            check_training(config, local=options.scheduler in LOCAL)
            if options.dryrun:
                dry_run(daily, options.day if options.day is not None else options.redo)
                return 0
            with locked(root / LOCK, "the pipeline"):
                with locked(root / JOB_LOCK, "a job", _LAST_SECONDS):
                    daily = Daily(config, jobs)  # the state as it is now
                return _run(daily, options)
    except (strict_yaml.ConfigError, DailyError) as error:
        print(error, file=sys.stderr)
    except OSError as error:  # a full disk, a root that may not be written
        print(f"{error}; mend it, and run again: it goes on where it was", file=sys.stderr)
    except (KeyboardInterrupt, SignalException) as error:
        print("stopped; run again to continue where it was", file=sys.stderr)
        return 128 + int(getattr(error, "sigval", 2))
    return FAILED


def _run(daily: Daily, options: argparse.Namespace) -> int:
    if options.skip is not None or options.unskip is not None:
        skipped = options.skip is not None
        daily.skip(options.skip if skipped else options.unskip, skipped)
        return 0
    if options.redo is not None:
        daily.forget(options.redo)
    day = options.day if options.day is not None else options.redo
    days = [day] if day is not None else daily.pending()
    if not days:
        current = daily.releases.current()
        print(f"nothing to do: {f'day {current.day} is published' if current else 'there is no log yet'}")
    return daily.run(days)


def check_training(config: DailyConfig, local: bool) -> None:
    """Refuse a training config that would fail hours later; on a cluster it may exist in the image only."""
    if not local and not Path(config.train.config).exists():
        return
    experiment = load_config(config.train.config, [*config.train.settings, *config.train.first_settings])
    if experiment.data.time_unit != config.logs.time_unit:
        raise DailyError(
            f"{config.train.config}: data.time_unit = {experiment.data.time_unit}, but logs.time_unit = "
            f"{config.logs.time_unit}: the log has one unit"
        )


if __name__ == "__main__":
    sys.exit(main())
