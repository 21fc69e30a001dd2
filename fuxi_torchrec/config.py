"""Every configuration key, in one place.

    python -m fuxi_torchrec.config                      # all keys with their defaults
    python -m fuxi_torchrec.config FILE key=value ...   # the same, resolved

Sections are frozen dataclasses; ``help`` in a field's metadata is the comment shown beside it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.distributed import DEFAULT_TIMEOUT_SECONDS
from fuxi_torchrec.strict_yaml import ConfigError


def _key(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class DistributedConfig:
    """How processes find and wait for each other."""

    device: Literal["auto", "cpu", "cuda"] = _key("auto", "auto takes CUDA where there is one")
    timeout_seconds: float = _key(DEFAULT_TIMEOUT_SECONDS, "a collective that waits longer for a peer is an error")

    def __post_init__(self) -> None:
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, not {self.timeout_seconds}")


@dataclass(frozen=True)
class LoggingConfig:
    """What is said while a job runs."""

    level: Literal["debug", "info", "warning", "error"] = _key("info", "least severe message shown")


@dataclass(frozen=True)
class Config:
    """A whole experiment."""

    seed: int = _key(0, "everything random follows from it")
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read an experiment: defaults, then the file, then ``key.sub=value`` overrides.

    Example:
        >>> load_config(overrides=["seed=7", "logging.level=debug"]).logging.level
        'debug'
        >>> load_config(overrides=["logging.levle=debug"])
        Traceback (most recent call last):
        ...
        fuxi_torchrec.strict_yaml.ConfigError: command line: unknown key logging.levle; did you mean logging.level?
    """
    return strict_yaml.load(Config, path, overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a configuration, every default included."""
    parser = argparse.ArgumentParser(prog="python -m fuxi_torchrec.config", description=main.__doc__)
    parser.add_argument("settings", nargs="*", metavar="FILE | key=value", help="a YAML file, then overrides")
    settings = parser.parse_args(arguments).settings
    path = settings.pop(0) if settings and "=" not in settings[0] else None
    try:
        print(strict_yaml.dump(load_config(path, settings)), end="")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
