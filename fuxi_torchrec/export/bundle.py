"""An export on disk: what it holds, what it promises, and how it is opened.

manifest.json                written last: a directory without it is not an export
encoder.safetensors          the encoder's parameters, by their names in its class
tables.safetensors           item_table (items + 1, D), and feature_NAME of each feature: raw rows
features/NAME.parquet        value, index: what text values of a feature stand for; none if they are numbers
other-items.parquet          item_id: items of the dataset that the model does not know; index 0 in histories
items/part-00000.parquet     item_id, index, embedding: recommendable items by index, as the score uses them
users/part-00000.parquet     user_id, embedding, as_of, anchor_time, anchor_count, events, last_time, state_row
histories/part-00000.parquet user_id, item, timestamp, features: the encoded events, row by row as in users/
states/part-00000.bin        states of users with long histories; users/ has the row. None if states grow
index.faiss                  FAISS index over items/, ids are dense indices
programs/query.pt2, append.pt2   torch.export programs. None if states grow
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fuxi_torchrec.artifacts import crc32_of, sync, write_atomically
from fuxi_torchrec.encoders.base import SequenceEncoder
from fuxi_torchrec.encoders.norms import unit_length
from fuxi_torchrec.encoders.registry import config_from, make_encoder
from fuxi_torchrec.errors import FuxiError
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.log import LogSpec
from fuxi_torchrec.events.times import TimeUnit
from fuxi_torchrec.schema import Record, read_json

VERSION = 2
MANIFEST, ENCODER, TABLES, INDEX = "manifest.json", "encoder.safetensors", "tables.safetensors", "index.faiss"
ITEMS, USERS, HISTORIES, STATES, PROGRAMS = "items", "users", "histories", "states", "programs"
FEATURES, OTHER_ITEMS = "features", "other-items.parquet"
ITEM_TABLE = "item_table"


class ExportError(FuxiError, ValueError):
    """An export that cannot be read or written."""


@dataclass(frozen=True)
class FileEntry(Record):
    """A file as the manifest lists it."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest(Record):
    """What ``manifest.json`` says.

    Attributes:
        model: the encoder's configuration, its ``kind`` first.
        model_id: of these weights; states belong to exactly one.
        similarity, temperature: score = <q, e> / temperature, both of unit length for ``cosine``; embeddings in the
            export are scaled so that their inner product, over the temperature, is the score.
        log: how the events were read, and later ones are.
        as_of: the users' request time.
        max_length: events encoded of a user, the latest.
        state_min_events: users with fewer have no state and are encoded again from their history.
        state_bytes: of a state record, its checksum included; 0 where an encoder's states grow: none are stored.
        item_id_type, user_id_type: ``int64`` or ``string``.
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
    item_id_type: str
    user_id_type: str
    log: LogSpec
    features: tuple[Feature, ...] = ()
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

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


@dataclass(frozen=True)
class Bundle:
    """A finished export."""

    path: Path
    manifest: Manifest

    @staticmethod
    def open(path: str | Path, verify: Literal["sizes", "checksums"] = "sizes") -> "Bundle":
        """Read the manifest and check the files' sizes, or their contents too."""
        path = Path(path)
        try:
            text = (path / MANIFEST).read_text()
        except OSError:
            raise ExportError(
                f"{path}: no export here: {MANIFEST} is missing or cannot be read. It is written last, so an "
                "unfinished export has none: export again"
            ) from None
        manifest = read_json(Manifest, text, path / MANIFEST, ExportError, "export again", version=("version", VERSION))
        for name, entry in manifest.files.items():
            _check_file(path / name, entry, contents=verify == "checksums")
        return Bundle(path, manifest)

    def parts(self, folder: str) -> list[Path]:
        """The files of a folder, in order; a file has itself."""
        return [self.path / name for name in sorted(self.manifest.files) if f"{name}/".startswith(folder + "/")]

    def check(self, *names: str) -> None:
        """Refuse files, or folders with a file, whose contents are not as the manifest says."""
        for name in names:
            for path in self.parts(name):
                _check_file(path, self.manifest.files[str(path.relative_to(self.path))], contents=True)

    def encoder(self) -> SequenceEncoder:
        """The encoder, ready to serve."""
        try:
            encoder = make_encoder(config_from(self.manifest.model))
        except (KeyError, TypeError, ValueError) as error:
            raise ExportError(f"{self.path / MANIFEST}: model is not an encoder's configuration: {error}") from None
        encoder.load_state_dict(load_file(self.path / ENCODER))
        return encoder.eval().requires_grad_(False)

    def tables(self) -> dict[str, Tensor]:
        """Raw rows of the item table and of features."""
        return load_file(self.path / TABLES)

    def feature_rows(self) -> dict[str, int]:
        """How many rows the table of each feature has."""
        names = [feature.name for feature in self.manifest.features]
        if not names:
            return {}
        self.check(TABLES)
        with safe_open(self.path / TABLES, "pt") as file:
            return {name: file.get_slice(f"feature_{name}").get_shape()[0] for name in names}


def _check_file(path: Path, entry: FileEntry, contents: bool) -> None:
    if not path.exists():
        raise ExportError(f"{path} is missing: the export is damaged, export again")
    if path.stat().st_size != entry.size:
        raise ExportError(f"{path} has {path.stat().st_size} bytes where the manifest says {entry.size}: export again")
    if contents and crc32_of(path) != entry.crc32:
        raise ExportError(f"{path} has another checksum than the manifest says: the file is damaged, export again")


def describe_file(path: Path) -> FileEntry:
    """A file that was written and is on disk now; reads it once."""
    sync(path)
    sync(path.parent)
    return FileEntry(path.stat().st_size, crc32_of(path))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """The commit of an export: all other files are there and on disk."""
    write_atomically(directory / MANIFEST, manifest.to_json())


def scaled(vectors: Tensor, similarity: str) -> Tensor:
    """Vectors as scores use them: of unit length for ``cosine``."""
    return unit_length(vectors) if similarity == "cosine" else vectors
