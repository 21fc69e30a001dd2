"""An export on disk: what it holds, what it promises, and how it is opened.

Nobody reads a byte of it that was not checked: manifest.json is sealed and has checksums of all files, which
:meth:`Bundle.file` compares before a file's first use. Parquet files prove every part when it is read
(:mod:`fuxi_torchrec.events.parquet`), states every record.

manifest.json                written last: a directory without it is not an export
encoder.safetensors          the encoder's parameters, by their names in its class
repeats.safetensors          the bias for items of users' windows; none if the model has none
tables.safetensors           item_table (items + 1, D), with features of items, and feature_NAME of each feature of
                             events: raw rows; item_feature_NAME and item_projection (D, inputs) make rows of new items,
                             user_feature_NAME and user_projection those of users with other features;
                             event_projection takes numbers and vectors of events
features/NAME.parquet        value, index: what text values of a feature stand for; none if they are numbers
item-features/NAME.parquet   the same of features of items; user-features/ of users
user-rows/part-00000.parquet user_id, row: of users with features, what is added to the encoder's output for the query
other-items.parquet          item_id: items of the dataset that the model does not know; index 0 in histories
items/part-00000.parquet     item_id, index, embedding: recommendable items by index, as the score uses them
users/part-00000.parquet     user_id, embedding, as_of, anchor_time, anchor_count, events, last_time, state_row; with a
                             bias window_item and window_score, what the last distinct items score in place of products
histories/part-00000.parquet user_id, item, timestamp, features: the encoded events, row by row as in users/
states/part-00000.bin        states of users with long histories, with their windows; users/ has the row. None if states
                             grow
index.faiss                  FAISS index over items/, ids are dense indices
programs/query.pt2, append.pt2   torch.export programs. None if states grow
"""

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fuxi_torchrec.artifacts import crc32_of, inside, sync, write_atomically
from fuxi_torchrec.encoders.base import SequenceEncoder
from fuxi_torchrec.encoders.norms import unit_length
from fuxi_torchrec.encoders.registry import config_class, make_encoder, only_imported
from fuxi_torchrec.errors import FuxiError
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.feature_files import FeatureFile
from fuxi_torchrec.events.features import OWNERS, Feature, Owner
from fuxi_torchrec.events.log import LogSpec
from fuxi_torchrec.events.times import TimeUnit
from fuxi_torchrec.export.options import Verify
from fuxi_torchrec.schema import Record, read_json, sealed
from fuxi_torchrec.tasks.repeats import RepeatBias, RepeatsConfig

VERSION = 3
MANIFEST, ENCODER, TABLES, INDEX = "manifest.json", "encoder.safetensors", "tables.safetensors", "index.faiss"
REPEATS = "repeats.safetensors"
ITEMS, USERS, HISTORIES, STATES, PROGRAMS = "items", "users", "histories", "states", "programs"
FEATURES, OTHER_ITEMS, USER_ROWS = "features", "other-items.parquet", "user-rows"
OWNED: tuple[Owner, ...] = ("item", "user")  # whose features make rows
DISPLAY = "display_"  # before names of columns of items/ that are shown
_PARTS = (ITEMS, USERS, HISTORIES, STATES)
ITEM_TABLE = "item_table"
IdType = Literal["int64", "string"]

# every file that an export can have
_NAMES = re.compile(
    r"(encoder|tables|repeats)\.safetensors|other-items\.parquet|index(-int8)?\.faiss|programs/(query|append)\.pt2"
    r"|((item|user)-)?features/[^/\0]+\.parquet|(items|users|user-rows|histories)/part-\d{5,9}\.parquet|states/part-\d{5,9}\.bin"
)
_AGAIN = "export again"


def values_folder(owner: Owner) -> str:
    """Where the text values of an owner's features are."""
    return FEATURES if owner == "event" else f"{owner}-{FEATURES}"


def projection_name(owner: Owner) -> str:
    """The table that projects an owner's numbers and vectors."""
    return f"{owner}_projection"


class ExportError(FuxiError, ValueError):
    """An export that cannot be read or written."""


@dataclass(frozen=True)
class FileEntry(Record):
    """A file as the manifest lists it."""

    size: int
    crc32: int  # of a Parquet file the checksum of its checksums


@dataclass(frozen=True)
class Manifest(Record):
    """What ``manifest.json`` says.

    Attributes:
        model: the encoder's configuration, its ``kind`` first.
        model_id: of these weights; states belong to exactly one.
        similarity, temperature: score = <q, e> / temperature, both of unit length for ``cosine``; embeddings in the
            export are scaled so that their inner product, over the temperature, is the score.
        repeats: of the bias for items of users' windows: the task's own settings; empty if there is none.
        log: how the events were read, and later ones are.
        as_of: the users' request time.
        max_length: events encoded of a user, the latest.
        state_min_events: users with fewer have no state and are encoded again from their history.
        state_bytes: of a state record, its window and its checksum included; 0 where an encoder's states grow: none are
            stored.
        item_id_type, user_id_type: ``int64`` or ``string``.
        item_features, item_file: of items that the model reads, and how a file of new items is read.
        user_features, user_file: the same of users.
        index: kind and measured recall of the FAISS index.
        dataset: fingerprint of the data it was made from.
        rules: of anchors, as_of and ties, in words.
        parent: model_id and as_of of the export that a refresh began with, what was applied to it and who was forgotten
            (hashes, and until when); None for a full export.
    """

    model: dict[str, Any]
    model_id: str
    similarity: Literal["cosine", "dot"]
    temperature: float
    dimension: int
    as_of: int
    max_length: int
    state_min_events: int
    state_bytes: int
    items: int
    users: int
    states: int
    item_id_type: IdType
    user_id_type: IdType
    log: LogSpec
    repeats: dict[str, Any] = field(default_factory=dict)
    features: tuple[Feature, ...] = ()
    item_features: tuple[Feature, ...] = ()
    item_file: FeatureFile = field(default_factory=FeatureFile)
    user_features: tuple[Feature, ...] = ()
    user_file: FeatureFile = field(default_factory=FeatureFile)
    index: dict[str, Any] = field(default_factory=dict)
    dataset: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    parent: dict[str, Any] | None = None
    version: int = VERSION

    @property
    def time_unit(self) -> TimeUnit:
        return self.log.time_unit

    @property
    def window(self) -> int:
        """Items of a user's window; 0 where scores have no bias."""
        return self.repeats["window"] if self.repeats else 0

    def features_of(self, owner: Owner) -> tuple[Feature, ...]:
        """Of events, items or users."""
        return {"event": self.features, "item": self.item_features, "user": self.user_features}[owner]

    def to_json(self) -> str:
        return sealed(dataclasses.asdict(self))

    def __post_init__(self) -> None:
        for name in self.files:
            if not _NAMES.fullmatch(name):
                raise ValueError(f"files: {name!r} is no file of an export")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature must be a positive number, not {self.temperature}")
        if self.dimension != self.model.get("dim"):
            raise ValueError(f"dimension {self.dimension} is not model.dim, {self.model.get('dim')!r}")
        least = {"items": 0, "users": 0, "states": 0, "max_length": 1, "state_min_events": 1, "state_bytes": 0}
        for name, bound in least.items():
            if not bound <= getattr(self, name) < 2**62:
                raise ValueError(f"{name} must be at least {bound}, not {getattr(self, name)}")
        if self.repeats and not (type(self.repeats.get("window")) is int and 0 < self.repeats["window"] <= 2**16):
            raise ValueError(f"repeats: window must be 1 to 65536, not {self.repeats.get('window')!r}")
        if not -(2**62) < self.as_of < 2**62:
            raise ValueError(f"as_of {self.as_of} is no time")
        self._check_files()

    def _check_files(self) -> None:
        """What one part of the manifest promises, the files must be able to keep."""
        needed = {ENCODER, TABLES}
        for owner in OWNERS:
            needed |= {f"{values_folder(owner)}/{f.name}.parquet" for f in self.features_of(owner) if f.vocabulary}
        needed |= {OTHER_ITEMS} if self.log.drops_rare_items else set()
        needed |= {INDEX} if self.index else set()
        needed |= {REPEATS} if self.repeats else set()
        if missing := sorted(needed - self.files.keys()):
            raise ValueError(f"files: {', '.join(missing)} is missing")
        if REPEATS in self.files and not self.repeats:
            raise ValueError(f"files: {REPEATS} is there, and repeats says nothing of it")
        parts = {folder: {Path(n).stem for n in self.files if n.startswith(folder + "/")} for folder in _PARTS}
        if parts[USERS] != parts[HISTORIES] or not parts[STATES] <= parts[USERS]:
            raise ValueError("files: users/, histories/ and states/ are not of the same parts")
        for folder, count in ((ITEMS, self.items), (USERS, self.users), (STATES, self.states)):
            if count and not parts[folder]:
                raise ValueError(f"files: {count} {folder} and no file of them")
        if self.states > self.users or (self.states and not self.state_bytes):
            raise ValueError(f"{self.states} states of {self.users} users, of {self.state_bytes} bytes")


@dataclass(frozen=True)
class Bundle:
    """A finished export.

    Attributes:
        verify: ``checksums``: a file's contents are compared with the manifest before its first use; ``sizes``: sizes
            alone, of what other than Parquet files and states.
    """

    path: Path
    manifest: Manifest
    verify: Verify = "checksums"
    _checked: set[str] = field(default_factory=set)

    @staticmethod
    def open(path: str | Path, verify: Verify = "checksums") -> "Bundle":
        """Read the manifest, and check that its files are there and of the right size."""
        path = Path(path)
        try:
            text = (path / MANIFEST).read_bytes()
        except OSError:
            raise ExportError(
                f"{path}: no export here: {MANIFEST} is missing or cannot be read. It is written last, so an "
                "unfinished export has none: export again"
            ) from None
        where, version = path / MANIFEST, ("version", VERSION)
        manifest = read_json(Manifest, text, where, ExportError, _AGAIN, version=version, seal=True)
        for name, entry in manifest.files.items():
            file = inside(path, name, ExportError)
            if not file.is_file():
                raise ExportError(f"{file} is missing: the export is damaged, export again")
            if file.stat().st_size != entry.size:
                size = file.stat().st_size
                raise ExportError(f"{file} has {size} bytes where the manifest says {entry.size}: export again")
        return Bundle(path, manifest, verify)

    def file(self, name: str) -> Path:
        """A file of the manifest, found right when it is first asked for: whoever reads one asks here."""
        if name not in self.manifest.files:
            raise ExportError(f"{self.path}: the export has no {name}")
        if name not in self._checked:
            if name.endswith(".parquet"):  # the rest is checked as it is read
                self._compare(name, checksum(self.path / name, everything=False))
            elif self.verify == "checksums" and not name.startswith(f"{STATES}/"):
                self._compare(name, crc32_of(self.path / name))
            self._checked.add(name)
        return self.path / name

    def parts(self, folder: str) -> list[Path]:
        """The files of a folder, in order, each as :meth:`file` gives it."""
        return [self.file(name) for name in sorted(self.manifest.files) if name.startswith(f"{folder}/")]

    def check(self) -> None:
        """Read every byte of every file and compare it with the manifest."""
        for name in self.manifest.files:
            self._compare(name, checksum(self.path / name))

    def _compare(self, name: str, crc32: int) -> None:
        if crc32 != self.manifest.files[name].crc32:
            raise ExportError(
                f"{self.path / name} has another checksum than the manifest says: the file is damaged, export again"
            )

    def encoder(self) -> SequenceEncoder:
        """The encoder, ready to serve."""
        model, where = self.manifest.model, f"{self.path / MANIFEST}: model"
        try:
            with only_imported():
                schema = config_class(str(model.get("kind")))
            if odd := sorted(model.keys() ^ {field.name for field in dataclasses.fields(schema)}):
                raise ExportError(f"{where}: {', '.join(odd)} is missing or unexpected; {_AGAIN}")
            size = self.manifest.files[ENCODER].size
            if large := [name for name, value in model.items() if isinstance(value, int) and value > size]:
                raise ExportError(f"{where}: {large[0]} = {model[large[0]]} does not fit the {size} bytes of {ENCODER}")
            config = read_json(schema, json.dumps(model), where, ExportError, _AGAIN)
            encoder = make_encoder(config)
        except ExportError:
            raise
        except Exception as error:  # of any encoder's own code
            raise ExportError(f"{where} is not an encoder's configuration: {error}") from None
        try:
            encoder.load_state_dict(load_file(self.file(ENCODER)))
        except (RuntimeError, SafetensorError) as error:
            raise ExportError(f"{self.path / ENCODER}: not the weights of {MANIFEST}'s model: {error}") from None
        return encoder.eval().requires_grad_(False)

    def repeats(self) -> RepeatBias | None:
        """The bias for items of users' windows, ready to serve; None if there is none."""
        if not self.manifest.repeats:
            return None
        text, where = json.dumps(self.manifest.repeats), f"{self.path / MANIFEST}: repeats"
        if odd := sorted(self.manifest.repeats.keys() ^ {field.name for field in dataclasses.fields(RepeatsConfig)}):
            raise ExportError(f"{where}: {', '.join(odd)} is missing or unexpected; {_AGAIN}")
        config = read_json(RepeatsConfig, text, where, ExportError, _AGAIN)
        bias = RepeatBias(config, self.manifest.dimension)
        try:
            bias.load_state_dict(load_file(self.file(REPEATS)))
        except (RuntimeError, SafetensorError) as error:
            raise ExportError(f"{self.path / REPEATS}: not the weights of {MANIFEST}'s repeats: {error}") from None
        return bias.eval().requires_grad_(False)

    def tables(self) -> dict[str, Tensor]:
        """Raw rows of the item table and of features."""
        path, names = self.file(TABLES), [f"feature_{f.name}" for f in self.manifest.features if f.in_table]
        try:
            tables = load_file(path)
        except SafetensorError as error:
            raise ExportError(f"{path}: not readable: {error}: export again") from None
        for owner in OWNED:
            names += [f"{owner}_feature_{f.name}" for f in self.manifest.features_of(owner) if f.in_table]
        for name in (ITEM_TABLE, *names):
            if name not in tables or tables[name].dim() != 2 or tables[name].shape[1] != self.manifest.dimension:
                raise ExportError(f"{path}: {name} is not a table of width {self.manifest.dimension}: export again")
        return tables

    def feature_rows(self) -> dict[str, int]:
        """How many rows the table of each feature has."""
        names = [feature.name for feature in self.manifest.features if feature.in_table]
        if not names:
            return {}
        with safe_open(self.file(TABLES), "pt") as file:
            return {name: file.get_slice(f"feature_{name}").get_shape()[0] for name in names}


def checksum(path: Path, everything: bool = True) -> int:
    """Of a file's contents, all of which are read; of a Parquet file, if not ``everything``, its end alone."""
    try:
        return parquet.checksum(path, everything) if path.suffix == ".parquet" else crc32_of(path)
    except DataError as error:
        raise ExportError(str(error)) from None


def describe_file(path: Path) -> FileEntry:
    """A file that was written and is on disk now; reads it once."""
    sync(path)
    sync(path.parent)
    return FileEntry(path.stat().st_size, checksum(path))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """The commit of an export: all other files are there and on disk."""
    write_atomically(directory / MANIFEST, manifest.to_json())


def scaled(vectors: Tensor, similarity: str) -> Tensor:
    """Vectors as scores use them: of unit length for ``cosine``."""
    return unit_length(vectors) if similarity == "cosine" else vectors
