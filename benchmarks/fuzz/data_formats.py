"""Datasets, logs of events, configurations."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

import fuxi_torchrec
from benchmarks.fuzz import outcomes
from benchmarks.fuzz.fixtures import COLUMNS
from benchmarks.fuzz.formats import Format, parquet_footer, parquet_pages
from benchmarks.fuzz.mutations import Mutation
from benchmarks.fuzz.outcomes import Outcome
from fuxi_torchrec import strict_yaml
from fuxi_torchrec.data.batches import BatchMaker, Items
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.splits import LeaveOneOut
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.export.parts import read_histories, read_users


def read_dataset(path: Path, _: Path | None = None) -> Any:
    """Everything that a job reads of a dataset: its description, all events, batches, ids and values."""
    dataset = Dataset.open(path)
    reader = Reader(dataset, [feature.name for feature in dataset.info.features])
    blocks = [vars(reader.block(number)) for number in range(len(reader.groups))]
    known = np.arange(dataset.info.items + 1) > 0
    batch = BatchMaker(reader, LeaveOneOut(), Items(known)).evaluation(np.arange(reader.users), "test", 50)
    texts = [dataset.feature_values(f.name).to_pylist() for f in dataset.info.features if f.vocabulary]
    return [dataset.info, reader.lengths(), blocks, batch, dataset.vocabulary().ids.to_pylist(), texts]


def prepare_log(place: Path, _: Path) -> Any:
    """A dataset of the log."""
    fuxi_torchrec.prepare(place / "events.parquet", place / "dataset", **COLUMNS)
    return read_dataset(place / "dataset")


def refresh_with_log(place: Path, fixtures: Path) -> Any:
    """An export that has the log's later events."""
    fuxi_torchrec.refresh(fixtures / "export", place / "later.parquet", place / "refreshed")
    bundle = Bundle.open(place / "refreshed")
    parts = [read_users(path) for path in bundle.parts("users")]
    histories = [
        read_histories(path, part.ids, bundle.manifest.features)
        for path, part in zip(bundle.parts("histories"), parts, strict=True)
    ]
    return [bundle.manifest.as_of, [{**vars(part), "ids": part.ids.to_pylist()} for part in parts], histories]


class ConfigFormat(Format):
    """A text that can be read is a configuration of its own: it must have what the text says, and nothing else."""

    def judge(self, answers: Any, wanted: Any, damage: str, mutation: Mutation) -> Outcome:
        """The configuration against the text, read as plain YAML."""
        said = yaml.safe_load(mutation.data)
        told = _missing(said if said is not None else {}, answers)
        return Outcome(outcomes.SILENT, damage, told) if told else Outcome(outcomes.CORRECT, damage)


def read_config(place: Path, _: Path) -> Any:
    """As plain values."""
    return strict_yaml.to_dict(fuxi_torchrec.load_config(place / "experiment.yaml"))


def _missing(said: Any, found: Any, where: str = "config") -> str | None:
    """Where a configuration has not what a text says."""
    if isinstance(said, dict) and isinstance(found, dict):
        absent = [key for key in said if key not in found]
        if absent:
            return f"{where} has no {absent[0]!r}"
        return next((told for key in said if (told := _missing(said[key], found[key], f"{where}.{key}"))), None)
    if said is None and isinstance(found, dict):
        return None  # a section whose every line is commented out
    if isinstance(said, str) and isinstance(found, float):
        said = float(said)  # 1e-3 is text in YAML 1.1
    if isinstance(said, bool) != isinstance(found, bool):
        return f"{where} is {found!r} where the text says {said!r}"
    return outcomes.difference(found, said, where)


FORMATS = [
    Format("dataset-pages", "features", ("part-*.parquet",), read_dataset, span=parquet_pages),
    Format("dataset-footers", "features", ("part-*.parquet",), read_dataset, span=parquet_footer),
    Format("dataset-json", "features", ("dataset.json",), read_dataset, "json"),
    Format("dataset-vocabularies", "features", ("items.parquet", "feature-*.parquet"), read_dataset),
    Format("plain-dataset", "plain", ("part-*.parquet", "items.parquet"), read_dataset),
    Format("plain-dataset-json", "plain", ("dataset.json",), read_dataset, "json"),
    Format("log-prepared", "log", ("events.parquet",), prepare_log),
    Format("log-refreshed", "log", ("later.parquet",), refresh_with_log),
    ConfigFormat("config", "configs", ("experiment.yaml",), read_config, "yaml"),
]
