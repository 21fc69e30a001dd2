"""What a run leaves on disk: a lock, its configuration, the known items, metrics, checkpoints."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.artifacts import lock, replace_file, write_atomically
from fuxi_torchrec.config import Config, differences, load_config
from fuxi_torchrec.encoders.registry import only_imported
from fuxi_torchrec.errors import FuxiError
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.vocabulary import Vocabulary
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint.info import Info

logger = get_logger(__name__)

CONFIG, ITEMS, PLAN, METRICS, SUMMARY = "config.yaml", "items.parquet", "plan.json", "metrics.jsonl", "summary.json"
PEAKS = ("peak_memory_mb", "longest_pause_of_a_save")  # of the summary
PREEMPTED = "preempted"  # a file: the job was preempted, and saved


class RunError(FuxiError, RuntimeError):
    """A run directory that cannot be used as asked."""


@dataclass(frozen=True)
class KnownItems:
    """Which items a run knows, and how often its training split has each."""

    known: NDArray[np.bool_]  # (items + 1,) entry 0 is False
    counts: NDArray[np.int64]  # (items + 1,) training events

    @property
    def ids(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.known)

    @property
    def fingerprint(self) -> str:
        """Of which they are; not of the counts."""
        return hashlib.sha256(np.packbits(self.known).tobytes() + str(len(self.known)).encode()).hexdigest()[:16]


class RunDirectory:
    """A run's directory, on storage that all ranks share."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: TextIO | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def lock(self) -> None:
        """Keep other jobs out; the system lets go when the process ends, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a+")
            mine = lock(self._lock)
        except OSError as error:
            raise RunError(f"{self.path}: cannot write to the run directory: {error.strerror}") from None
        if not mine:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            self._lock.close()
            self._lock = None
            raise RunError(
                f"{self.path}: the run directory is locked by {holder}: wait for that job, stop it, or take another "
                "--run-dir"
            )
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        self._lock.flush()

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read_config(self, overrides: Sequence[str] = ()) -> Config:
        """The run's configuration; code of one's own that it names must have been imported."""
        if not (self.path / CONFIG).exists():
            raise RunError(f"{self.path}: no run here: {CONFIG} is missing")
        with only_imported():
            return load_config(self.path / CONFIG, overrides)

    def check_config(self, config: Config) -> None:
        """Refuse the configuration of another run; what a resumed run may change is shown."""
        if (self.path / CONFIG).exists():
            changed = differences(self.read_config(), config)
            refused = [d for d in changed if not d.operational]
            if refused:
                lines = "\n".join(f"  {d.key}: {d.old!r} in the run, {d.new!r} now" for d in refused)
                raise RunError(
                    f"{self.path}: the run was started with other settings that decide its result:\n{lines}\n"
                    "Resume with the old ones, or take another --run-dir"
                )
            for d in changed:
                logger.info("resumed with %s = %r, was %r", d.key, d.new, d.old)

    def check_trained(self, config: Config, info: Info, checkpoint: Path) -> None:
        """Refuse settings that a checkpoint was not trained with: ``config.yaml`` was changed since."""
        trained = load_config(None, [f"{section}={json.dumps(value)}" for section, value in info.config.items()])
        changed = [d for d in differences(trained, config) if not d.operational]
        if changed:
            told = "; ".join(f"{d.key} is {d.new!r}, {checkpoint.name} was trained with {d.old!r}" for d in changed)
            raise RunError(f"{self.path / CONFIG}: {told}: put back what the run was trained with")

    def write_config(self, config: Config) -> None:
        write_atomically(self.path / CONFIG, strict_yaml.dump(config))

    # --- known items -------------------------------------------------------------------------------------------------

    def write_items(self, vocabulary: Vocabulary, items: KnownItems) -> None:
        table = pa.table(
            {
                "item_id": vocabulary.ids,
                "index": pa.array(np.arange(1, len(vocabulary) + 1)),
                "count": pa.array(items.counts[1:]),
                "known": pa.array(items.known[1:]),
            }
        )
        with replace_file(self.path / ITEMS) as aside:
            parquet.write_table(aside, table)

    def read_items(self) -> KnownItems:
        try:
            table = parquet.read_table(self.path / ITEMS, ["count", "known"])
        except DataError as error:
            raise DataError(f"{error}; put a copy in its place, or take another --run-dir") from None
        known = np.concatenate([[False], table["known"].to_numpy(zero_copy_only=False)])
        return KnownItems(known.astype(bool), np.concatenate([[0], table["count"].to_numpy()]).astype(np.int64))

    def has_items(self) -> bool:
        return (self.path / ITEMS).exists()

    def larger_peaks(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Those of an earlier start of the run, where they are larger than a new summary's."""
        path = self.path / SUMMARY
        if not path.exists():
            return {}
        try:
            before = json.loads(path.read_bytes())
            return {name: before[name] for name in PEAKS if before[name] > summary[name]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("%s: not a summary, it is written anew: %r", path, error)
            return {}

    # --- metrics -----------------------------------------------------------------------------------------------------

    def log(self, entry: dict[str, Any]) -> None:
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def forget_metrics_after(self, step: int) -> None:
        """Steps that a resumed run will train again are logged again."""
        path = self.path / METRICS
        if not path.exists():
            return
        kept = []
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError, RecursionError):  # cut short when the process was killed
                logger.warning("%s: line %d is no entry, and left out: %.80s", path, number, line)
        write_atomically(path, "".join(kept))
