"""An export with more items: rows, vectors and index of items that a file describes by their features.

Users, states and everything else are the same files: an item that nobody has had changes nobody's vector.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fuxi_torchrec.artifacts import NewDirectory, follow_umask, sync
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.feature_files import RawFeatures
from fuxi_torchrec.export import index as indices
from fuxi_torchrec.export.bundle import (
    DISPLAY,
    INDEX,
    ITEM_TABLE,
    ITEMS,
    TABLES,
    USERS,
    Bundle,
    ExportError,
    describe_file,
    scaled,
    write_manifest,
)
from fuxi_torchrec.export.parts import part_name, part_number
from fuxi_torchrec.serving.catalogue import UNKNOWN, ItemIds
from fuxi_torchrec.serving.feature_rows import read_file
from fuxi_torchrec.serving.new_items import AddedItems, ItemComposer, latest
from fuxi_torchrec.serving.store import Content

INT8_INDEX = "index-int8.faiss"


def add_items(export: str | Path, items: str | Path, output: str | Path) -> AddedItems:
    """Write a new export that has the items of a Parquet or CSV file too, read as the dataset's file was.

    Items that the export has stay as they are.

    Args:
        export: the one to begin with; it is not changed.
        items: the file, with the columns that the model reads and those that are shown.
        output: must not exist.
    """
    bundle = Bundle.open(export)
    composer = ItemComposer(bundle, bundle.tables())
    return _write(composer, bundle, read_file(bundle, items, "item"), output)


@contextmanager
def with_stored_items(bundle: Bundle, content: Content | None, output: Path) -> Iterator[tuple[Bundle, int]]:
    """The export with the items that were added to a Recommender's store, and how many these are.

    It is there as long as a refresh reads it: events of added items are encoded as the Recommender encoded them.

    Args:
        content: of the store; None if there is none.
        output: of the refresh; the export is made beside it.
    """
    stored = () if content is None else latest(content.items, bundle.manifest.item_file.id_column).values()
    if not stored:
        yield bundle, 0
        return
    composer = ItemComposer(bundle, bundle.tables())
    raw = composer.read([row.event().features or {} for row in stored])
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{output.name}.items-", dir=output.parent) as place:
        path = Path(place) / "export"
        done = _write(composer, bundle, raw, path)
        yield Bundle.open(path), done.added


def _write(composer: ItemComposer, bundle: Bundle, raw: RawFeatures, output: str | Path) -> AddedItems:
    new = np.flatnonzero(ItemIds.read(bundle).find(raw.ids) <= UNKNOWN)
    rows, unknown = composer.rows(raw)
    try:
        with NewDirectory(output) as place:
            _Writer(bundle, place, bundle.tables(), raw, new).write(rows[torch.from_numpy(new)])
    except (OSError, SafetensorError) as error:  # a full disk, most likely
        raise ExportError(f"{output}: cannot be written: {error}") from None
    return AddedItems(len(new), 0, len(raw.ids) - len(new), unknown)


@dataclass(frozen=True)
class _Writer:
    bundle: Bundle
    place: Path
    tables: dict[str, Tensor]
    raw: RawFeatures
    new: Any  # rows of the file that are new

    def write(self, rows: Tensor) -> None:
        """All files, then the manifest."""
        manifest, files = self.bundle.manifest, dict(self.bundle.manifest.files)
        number = 1 + max((part_number(path) for path in self.bundle.parts(ITEMS)), default=-1)
        part, changed = part_name(ITEMS, number), [TABLES]
        if len(self.new):
            self._write_part(part, rows)
            changed.append(part)
        save_file({**self.tables, ITEM_TABLE: torch.cat([self.tables[ITEM_TABLE], rows])}, self.place / TABLES)
        follow_umask(self.place / TABLES)
        built = [name for name in (INDEX, INT8_INDEX) if name in files] if len(self.new) else []
        for name in files:
            if name not in (*changed, *built):
                self._link(name)
        about = manifest.index
        if built:
            about = self._build(
                manifest.items + len(self.new), [n for n in files if n.startswith(f"{ITEMS}/")] + [part]
            )
        files |= {name: describe_file(self.place / name) for name in (*changed, *built)}
        items = manifest.items + len(self.new)
        write_manifest(self.place, replace(manifest, items=items, index=about, files=dict(sorted(files.items()))))

    def _write_part(self, name: str, rows: Tensor) -> None:
        first, take = len(self.tables[ITEM_TABLE]), pa.array(self.new)
        vectors = scaled(rows, self.bundle.manifest.similarity)
        columns = {
            "item_id": self.raw.ids.take(take),
            "index": pa.array(np.arange(first, first + len(self.new)), pa.int32()),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.numpy().reshape(-1)), rows.shape[1]),
        }
        columns |= {DISPLAY + name: self.raw.columns[name].take(take) for name in self.raw.file.display}
        (self.place / ITEMS).mkdir(exist_ok=True)
        parquet.write_table(self.place / name, pa.table(columns))

    def _build(self, items: int, parts: Sequence[str]) -> dict[str, Any]:
        """The index of all items, of the kind that it was, with the recall that it has now."""
        manifest, paths = self.bundle.manifest, [self.place / name for name in sorted(parts)]
        queries = indices.sample_queries(self.bundle.parts(USERS), 500, manifest.dimension)
        exact = indices.nearest_scores(paths, queries, indices.NEAREST)
        flat = manifest.index.get("kind") == "flat"
        found, about = indices.build(paths, items, manifest.dimension, items if flat else 0)
        about = {"file": INDEX, **indices.tuned(found, about, queries, exact, paths)}
        indices.write(found, self.place / INDEX)
        if INT8_INDEX in manifest.files:
            small = indices.build_int8(paths, items, manifest.dimension)
            recall = indices.recall(small, queries, exact, paths)
            indices.write(small, self.place / INT8_INDEX)
            size = (self.place / INT8_INDEX).stat().st_size
            about["int8"] = {"file": INT8_INDEX, "recall@100": recall, "recall_lost": 1.0 - recall, "bytes": size}
        return about

    def _link(self, name: str) -> None:
        link_file(self.bundle.path / name, self.place / name)


def link_file(source: Path, target: Path) -> None:
    """The same file in another export, or a copy where links cannot be made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        sync(target)
