"""Exports without training: any encoder, tables and histories, or random ones, to try serving out."""

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor

from fuxi_torchrec.artifacts import crc32_of
from fuxi_torchrec.encoders.registry import DEFAULT_KIND, config_from, make_encoder
from fuxi_torchrec.encoders.state import EncoderState
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.histories import Column, Histories, Ints, Ragged, bounds_of
from fuxi_torchrec.events.log import LogSpec
from fuxi_torchrec.events.times import TimeUnit
from fuxi_torchrec.export.bundle import (
    ENCODER,
    FEATURES,
    HISTORIES,
    INDEX,
    ITEM_TABLE,
    ITEMS,
    OTHER_ITEMS,
    REPEATS,
    STATES,
    TABLES,
    USERS,
    Bundle,
    FileEntry,
    Manifest,
    describe_file,
    scaled,
    write_manifest,
)
from fuxi_torchrec.export.parts import ID_TYPES, Users, part_name, write_histories, write_users
from fuxi_torchrec.export.states import TRAILER_BYTES, StateFile
from fuxi_torchrec.serving.encoding import UserModel
from fuxi_torchrec.serving.windowed import WindowedStates
from fuxi_torchrec.tasks.repeats import RepeatBias, RepeatsConfig
from fuxi_torchrec.tasks.window_state import window_bytes

DAY = 86_400
START = 1_700_000_000


@dataclass(frozen=True)
class DemoExport:
    """What a demonstration export is made of.

    Attributes:
        items: recommendable items; raw ids are 1000 + index, or ``item-INDEX``.
        users: raw ids are their numbers from 0, or ``user-NUMBER``.
        events: histories have 0 to so many events.
        histories: given ones in place of random ones.
        state_min_events: shorter histories have no state.
        users_per_part: of users/, histories/ and states/.
        text_features: features whose values are ``value-INDEX``.
        log: of the LogSpec, what is not as it is by default.
        other_items: raw ids of other-items.parquet.
        repeats: settings of a bias for items of users' windows; none if empty.
    """

    items: int = 200
    users: int = 20
    events: int = 60
    seed: int = 0
    model: dict[str, Any] = field(
        default_factory=lambda: {
            "dim": 16,
            "num_layers": 2,
            "num_heads": 2,
            "max_positions": 64,
            "kernel_dim": 8,
            "temporal_periods": (3600, DAY, 7 * DAY, 365 * DAY),
        }
    )
    similarity: Literal["cosine", "dot"] = "cosine"
    temperature: float = 0.05
    time_unit: TimeUnit = "s"
    max_length: int = 48
    state_min_events: int = 20
    users_per_part: int = 8
    item_id_type: Literal["int64", "string"] = "int64"
    user_id_type: Literal["int64", "string"] = "int64"
    features: tuple[Feature, ...] = ()
    feature_rows: int = 8
    text_features: tuple[str, ...] = ()
    histories: Histories | None = None
    as_of: int | None = None
    index: bool = True
    log: dict[str, Any] = field(default_factory=dict)
    other_items: tuple[int | str, ...] = ()
    repeats: dict[str, Any] = field(default_factory=dict)

    def log_spec(self) -> LogSpec:
        """How its log was read: plain columns, unless ``log`` says more."""
        ids = {"int64": "BIGINT", "string": "VARCHAR"}
        columns = {"user_id": ids[self.user_id_type], "item_id": ids[self.item_id_type], "timestamp": "BIGINT"}
        for feature in self.features:
            text = feature.name in self.text_features
            columns[feature.name] = "VARCHAR" if text else "BIGINT" + "[]" * feature.multiple
        more = {**self.log, "columns": columns | self.log.get("columns", {})}
        return LogSpec(time_unit=self.time_unit, features=tuple(feature.name for feature in self.features), **more)


def write_demo_export(directory: str | Path, demo: DemoExport | None = None) -> Manifest:
    """Write an export of random weights: the format of a real one, whose answers mean nothing.

    Args:
        directory: must not exist.
        demo: what to make.
    """
    demo = demo or DemoExport()
    directory = Path(directory)
    for folder in (ITEMS, USERS, HISTORIES, STATES):
        (directory / folder).mkdir(parents=True)
    histories = demo.histories or random_histories(demo)
    config = config_from({"kind": DEFAULT_KIND, **demo.model})
    with torch.random.fork_rng():
        torch.manual_seed(demo.seed)
        encoder = make_encoder(config).eval()
        for parameter in encoder.parameters():  # away from starting values that hide mistakes
            parameter.data += 0.02 * torch.randn_like(parameter)
        tables = {ITEM_TABLE: torch.randn(demo.items + 1, config.dim) / config.dim**0.5}
        for feature in demo.features:
            tables[f"feature_{feature.name}"] = torch.randn(demo.feature_rows, config.dim) / config.dim**0.5
        bias = RepeatBias(RepeatsConfig(**demo.repeats), config.dim) if demo.repeats else None
        if bias is not None:  # of both signs, and large enough to matter
            save_file({name: torch.randn(p.shape) for name, p in bias.state_dict().items()}, directory / REPEATS)
    save_file(dict(encoder.state_dict()), directory / ENCODER)
    save_file(tables, directory / TABLES)
    _write_items(directory, demo, tables[ITEM_TABLE])
    if demo.log_spec().drops_rare_items:
        others = pa.array(demo.other_items, ID_TYPES[demo.item_id_type])
        parquet.write_table(directory / OTHER_ITEMS, pa.table({"item_id": others}))
    for name in demo.text_features:
        (directory / FEATURES).mkdir(exist_ok=True)
        index = np.arange(1, demo.feature_rows)
        known = pa.table({"value": [f"value-{n}" for n in index], "index": pa.array(index, pa.int32())})
        parquet.write_table(directory / FEATURES / f"{name}.parquet", known)
    as_of = demo.as_of if demo.as_of is not None else int(histories.times.max(initial=START))
    window = demo.repeats.get("window", 0)
    manifest = Manifest(
        model=dataclasses.asdict(config),
        model_id=f"demo-{crc32_of(directory / ENCODER):08x}-{crc32_of(directory / TABLES):08x}",
        similarity=demo.similarity,
        temperature=demo.temperature,
        dimension=config.dim,
        as_of=as_of,
        max_length=demo.max_length,
        state_min_events=demo.state_min_events,
        state_bytes=encoder.state_bytes and encoder.state_bytes + window_bytes(window) + TRAILER_BYTES,
        repeats=dataclasses.asdict(bias.config) if bias is not None else {},
        items=demo.items,
        users=0,
        states=0,
        item_id_type=demo.item_id_type,
        user_id_type=demo.user_id_type,
        log=demo.log_spec(),
        features=demo.features,
        files=_described(directory),
    )
    states = write_user_parts(
        Bundle(directory, manifest), raw_ids("user", 0, len(histories), demo.user_id_type), histories, demo
    )
    finished = dataclasses.replace(manifest, users=len(histories), states=states, files=_described(directory))
    write_manifest(directory, finished)
    return finished


def _described(directory: Path) -> dict[str, FileEntry]:
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): describe_file(path) for path in found}


def write_user_parts(bundle: Bundle, ids: pa.Array, histories: Histories, demo: DemoExport) -> int:
    """Encode all users from their last events; the number of states."""
    model, manifest, states = UserModel(bundle), bundle.manifest, 0
    for number, begin in enumerate(range(0, max(1, len(ids)), demo.users_per_part)):
        rows = np.arange(begin, min(begin + demo.users_per_part, len(ids)))
        part = histories.select(rows)
        users = Users.new(ids.take(pa.array(rows)), manifest.dimension, manifest.window)
        users.anchor_count = np.maximum(part.lengths - manifest.max_length, 0)
        part = part.last(np.full(len(rows), manifest.max_length))
        users.as_of[:] = manifest.as_of
        states += encode_part(bundle, model, number, users, part)
    return states


def encode_part(bundle: Bundle, model: UserModel, number: int, users: Users, part: Histories) -> int:
    """Write one part of users, whose encoded events are ``part``; the number of states."""
    manifest = bundle.manifest
    users.events = part.lengths
    some = users.events > 0
    users.anchor_time[some] = part.times[part.offsets[:-1][some]]
    users.last_time[some] = part.times[part.offsets[1:][some] - 1]
    state = model.encode(part)
    vectors = model.vectors(state, users.as_of)
    users.embedding = vectors.numpy()
    if manifest.window:
        users.window_item, users.window_score = (
            each.numpy() for each in model.window_scores(state, vectors, users.as_of)
        )
    kept = np.flatnonzero(users.events >= (manifest.state_min_events if manifest.state_bytes else np.inf))
    if manifest.state_bytes:
        assert isinstance(state, EncoderState | WindowedStates)
        path = bundle.path / part_name(STATES, number, "bin")
        with StateFile.create(path, manifest.model_id, manifest.state_bytes - TRAILER_BYTES) as file:
            users.state_row[kept] = file.append(state.select(torch.from_numpy(kept)).to_bytes())
    write_users(bundle.path / part_name(USERS, number), users)
    write_histories(bundle.path / part_name(HISTORIES, number), users.ids, part)
    return len(kept)


def _write_items(directory: Path, demo: DemoExport, rows: Tensor) -> None:
    index = np.arange(1, demo.items + 1)
    vectors = scaled(rows[1:], demo.similarity).numpy()
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    ids = raw_ids("item", 1001 if demo.item_id_type == "int64" else 1, demo.items, demo.item_id_type)
    table = pa.table({"item_id": ids, "index": pa.array(index, pa.int32()), "embedding": embedding})
    parquet.write_table(directory / part_name(ITEMS, 0), table)
    if demo.index:
        import faiss

        flat = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
        flat.add_with_ids(vectors, index)
        faiss.write_index(flat, str(directory / INDEX))


def raw_ids(what: str, first: int, count: int, kind: str) -> pa.Array:
    """Raw ids of a demonstration's users and items."""
    numbers: Sequence[Any] = range(first, first + count)
    return pa.array([f"{what}-{n}" for n in numbers] if kind == "string" else list(numbers), ID_TYPES[kind])


def random_histories(demo: DemoExport) -> Histories:
    """Histories of random items and rising times, ties included; some items are unknown."""
    draw = np.random.default_rng(zlib.crc32(b"histories") + demo.seed)
    lengths = draw.integers(0, demo.events + 1, demo.users)
    total = int(lengths.sum())
    items = draw.integers(0, demo.items + 1, total)
    gaps = np.where(draw.random(total) < 0.2, 0, draw.integers(1, DAY, total))
    offsets: Ints = bounds_of(lengths)
    times = START + gaps.cumsum() - np.repeat(gaps.cumsum()[np.minimum(offsets[:-1], max(total - 1, 0))], lengths)
    features: dict[str, Column] = {}
    for feature in demo.features:
        counts = draw.integers(0, 4, total) if feature.multiple else np.ones(total, np.int64)
        values = draw.integers(0, demo.feature_rows, int(counts.sum()))
        features[feature.name] = Ragged(values, bounds_of(counts)) if feature.multiple else values
    return Histories(offsets, items, times.astype(np.int64), features)
