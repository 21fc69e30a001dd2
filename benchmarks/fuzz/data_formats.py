"""Datasets, logs of events, configurations."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml

import fuxi_torchrec
from benchmarks.fuzz import outcomes
from benchmarks.fuzz.fixtures import COLUMNS, prepare_with_features
from benchmarks.fuzz.formats import Format, parquet_footer, parquet_pages
from benchmarks.fuzz.mutations import Mutation
from benchmarks.fuzz.outcomes import Outcome
from fuxi_torchrec import strict_yaml
from fuxi_torchrec.data.batches import BatchMaker, Items
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.splits import LeaveOneOut
from fuxi_torchrec.events.features import Owner
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.export.parts import read_histories, read_users
from pipelines.daily.state import Layout, Releases, State

OWNERS: tuple[Owner, ...] = ("item", "user")


def read_dataset(path: Path, _: Path | None = None) -> Any:
    """Everything that a job reads of a dataset: its description, all events, batches, ids and values."""
    dataset = Dataset.open(path)
    reader = Reader(dataset, [feature.name for feature in dataset.info.features])
    blocks = [vars(reader.block(number)) for number in range(len(reader.groups))]
    known = np.arange(dataset.info.items + 1) > 0
    batch = BatchMaker(reader, LeaveOneOut(), Items(known)).evaluation(np.arange(reader.users), "test", 50)
    texts = [dataset.feature_values(f.name).to_pylist() for f in dataset.info.features if f.vocabulary]
    found = [dataset.info, reader.lengths(), blocks, batch, dataset.vocabulary().ids.to_pylist(), texts]
    for owner in OWNERS:
        if dataset.owned(owner).there:
            named = [f.name for f in dataset.owned(owner).features if f.vocabulary]
            found += [dataset.features_of(owner), [dataset.feature_values(name, owner).to_pylist() for name in named]]
    if dataset.info.item_features.file.display:
        found.append(dataset.display().to_pylist())
    return found


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


def prepare_features(place: Path, _: Path) -> Any:
    """A dataset of the log with features of items and users."""
    prepare_with_features(place, place / "dataset")
    return read_dataset(place / "dataset")


def refresh_with_items(place: Path, fixtures: Path) -> Any:
    """An export that has more items."""
    from fuxi_torchrec.serving.refresh.new_items import add_items

    add_items(fixtures / "export", place / "more-items.parquet", place / "refreshed")
    with fuxi_torchrec.Recommender.load(place / "refreshed", read_only=True) as recommender:
        found = [recommender.similar_items(item, 5) for item in ("item-7", "item-1000", "item-1011")]
        return [recommender.manifest.items, [vars(each) | {"scores": np.array(each.scores)} for each in found]]


def refresh_with_users(place: Path, fixtures: Path) -> Any:
    """An export with other features of users."""
    fuxi_torchrec.refresh(fixtures / "export", None, place / "refreshed", users=place / "users.parquet")
    bundle = Bundle.open(place / "refreshed")
    return [read_users(path).embedding for path in bundle.parts("users")]


class CsvFormat(Format):
    """A text that can be read is a log of its own: the dataset must have the events that it says, and no others."""

    def judge(self, answers: Any, wanted: Any, damage: str, mutation: Mutation) -> Outcome:
        """The histories against the text, read by Python's own module."""
        told = outcomes.difference(answers, histories_of(mutation.data.decode(errors="surrogateescape")))
        return Outcome(outcomes.SILENT, damage, told) if told else Outcome(outcomes.CORRECT, damage)


def histories_of(text: str) -> dict[str, list[tuple[int, str]]]:
    """Of each user of a log: times and items, by time."""
    found: dict[str, list[tuple[int, str]]] = {}
    for row in csv.DictReader(io.StringIO(text, newline="")):
        found.setdefault(row["user_id"], []).append((int(row["timestamp"]), row["item_id"]))
    return {user: sorted(found[user], key=lambda event: event[0]) for user in sorted(found)}


def prepare_csv(place: Path, _: Path) -> Any:
    """The histories of a dataset of the log, in raw ids."""
    fuxi_torchrec.prepare(place / "events.csv", place / "dataset")
    dataset = Dataset.open(place / "dataset")
    ids, found = [None, *dataset.vocabulary().ids.to_pylist()], {}
    for part in dataset.info.files:
        for row in pq.read_table(place / "dataset" / part.name).to_pylist():
            pairs = zip(row["timestamp"], row["item"], strict=True)
            found[row["user_id"]] = [(time, ids[item]) for time, item in pairs]
    return {user: found[user] for user in sorted(found)}


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


def read_pipeline(place: Path, _: Path) -> Any:
    """What a daily pipeline knows: its days, and what was published when."""
    releases = Releases(Layout(place))
    return [
        State(place).days,
        releases.line(),
        sorted(releases.ever()),
        [releases.read(day) for day in releases.line()],
    ]


FORMATS = [
    Format("dataset-pages", "features", ("part-*.parquet",), read_dataset, span=parquet_pages),
    Format("dataset-footers", "features", ("part-*.parquet",), read_dataset, span=parquet_footer),
    Format("dataset-json", "features", ("dataset.json",), read_dataset, "json"),
    Format("dataset-vocabularies", "features", ("items.parquet", "feature-*.parquet"), read_dataset),
    Format("plain-dataset", "plain", ("part-*.parquet", "items.parquet"), read_dataset),
    Format("plain-dataset-json", "plain", ("dataset.json",), read_dataset, "json"),
    Format("log-prepared", "log", ("events.parquet",), prepare_log),
    Format("log-refreshed", "log", ("later.parquet",), refresh_with_log),
    CsvFormat("log-csv", "csv", ("events.csv",), prepare_csv),
    Format("feature-files", "log", ("items.parquet", "users.parquet"), prepare_features),
    Format("items-refreshed", "log", ("more-items.parquet",), refresh_with_items),
    Format("users-refreshed", "log", ("users.parquet",), refresh_with_users),
    Format("dataset-features", "features", ("item-*.parquet", "user-*.parquet"), read_dataset),
    Format("daily-state", "daily", ("state.json",), read_pipeline, "json"),
    Format("daily-releases", "daily", ("releases/*/release.json",), read_pipeline, "json"),
    ConfigFormat("config", "configs", ("experiment.yaml",), read_config, "yaml"),
]
