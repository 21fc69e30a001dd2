"""Sorted events to a dataset: one row of lists per user, in Parquet, cut through Arrow's offsets.

Local datasets are written aside, by one process at a time, and renamed when complete; ``dataset.json`` comes last
everywhere.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuxi_torchrec.artifacts import NewDirectory
from fuxi_torchrec.data.dataset import (
    INFO,
    ITEM,
    TARGET,
    TIME,
    USER,
    VERSION,
    DatasetInfo,
    FileInfo,
    OwnedFeatures,
    histogram,
)
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import Feature, Owner
from fuxi_torchrec.events.filesystem import exists, is_local, resolve
from fuxi_torchrec.events.histories import bounds_of
from fuxi_torchrec.events.log import LogSpec

ROW_GROUP_EVENTS = 2**16  # small: the reader mixes several row groups of every stream
FILE_EVENTS = 2**23
_AHEAD = 32  # pieces of work, two for each row group


def encoding(schema: pa.Schema) -> dict[str, Any]:
    """Differences of neighbours are small in times and indices: fast to write, fast to read, and as small as zstd."""
    columns = {}
    for field in schema:
        path, kind = field.name, field.type
        while pa.types.is_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        if pa.types.is_integer(kind):
            columns[path] = "DELTA_BINARY_PACKED"
    return {"compression": "lz4", "use_dictionary": False, "column_encoding": columns}


def _single(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


class DatasetWriter:
    """Writes a dataset; nothing passes for one before :meth:`finish`.

    Args:
        output: where; must not exist.
        log: how the log was read.
        source: how it was made, for ``dataset.json``.

    Attributes:
        scratch: a directory beside a local output that goes away, at the latest with the next attempt; None remotely.
    """

    def __init__(self, output: str | Path, log: LogSpec, source: dict[str, Any]) -> None:
        self.place = self.output = str(output).rstrip("/")
        self.log, self.source = log, source
        self.scratch: str | None = None
        self._local = NewDirectory(self.output) if is_local(output) else None
        if self._local is not None:
            self.place, self.scratch = str(self._local.begin()), str(self._local.scratch)
        elif exists(self.output):
            raise DataError(f"{self.output} exists: nothing is written over it, choose another output")
        else:  # one that fails leaves files without dataset.json
            filesystem, inside = resolve(self.place)
            filesystem.create_dir(inside, recursive=True)
        self._files: list[FileInfo] = []
        self._tables: dict[str, int] = {}
        self._writer: parquet.Writer | None = None
        self._open: list[int] = [0, 0]  # users and events of the open file
        self._lengths: list[np.ndarray] = []
        self._times: list[tuple[int, int]] = []
        self._last_user: list[pa.Array] = []
        self._digest = hashlib.sha256()
        self._cardinality: dict[str, int] = {}
        self._schema: pa.Schema | None = None
        self._owned: dict[str, OwnedFeatures] = {}
        self._learned: dict[str, Feature] = {}
        # each keeps the order in which it is given work
        self._writing, self._noting = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._working: deque[Future[None]] = deque()

    def reserve(self, feature: str, rows: int) -> None:
        """A feature may have at least so many values, whether they occur or not; before anything is written."""
        self._cardinality[feature] = max(self._cardinality.get(feature, 0), rows)

    def write(self, events: pa.Table) -> None:
        """Add whole users: a table of events, sorted by user and time."""
        runs = pc.run_end_encode(_single(events[USER]), run_end_type=pa.int64())
        self.write_users(runs.values, np.diff(runs.run_ends.to_numpy(), prepend=0), events)

    def write_users(self, users: pa.Array, lengths: np.ndarray, events: pa.Table | pa.RecordBatch) -> None:
        """Add whole users, as one row group: their ids, the events of each, and the events.

        It is written while the caller makes the next ones; an error shows there, or in :meth:`finish`.
        """
        offsets = pa.array(bounds_of(lengths), pa.int32())
        names = [name for name in events.schema.names if name != USER]
        lists = {name: pa.ListArray.from_arrays(offsets, _single(events[name])) for name in names}
        rows = pa.table({USER: users, **lists})
        self._lengths.append(lengths)
        self._working.append(self._writing.submit(self._write, rows, events.num_rows))
        self._working.append(self._noting.submit(self._note, rows))
        while len(self._working) > _AHEAD:
            self._working.popleft().result()

    def _write(self, rows: pa.Table, events: int) -> None:
        if self._writer is None:
            path = f"{self.place}/{self._part()}"
            self._writer = parquet.Writer(path, rows.schema, **encoding(rows.schema))
            self._schema, self._open = rows.schema, [0, 0]
        self._writer.write(rows)
        self._open[0] += len(rows)
        self._open[1] += events
        if self._open[1] >= FILE_EVENTS:
            self._close_file()

    def _part(self) -> str:
        return f"part-{len(self._files):05d}.parquet"

    def _note(self, rows: pa.Table) -> None:
        """Keep what ``dataset.json`` says about the contents; users come by rising ids, and so each once."""
        ids = _single(rows[USER])
        ids = pa.concat_arrays([*self._last_user, ids])
        if ids.null_count or pc.any(pc.greater_equal(ids[:-1], ids[1:])).as_py():
            raise DataError(f"{self.output}: users must be given by rising ids, each once")
        self._last_user = [ids[-1:]]
        times = _single(rows[TIME]).flatten().to_numpy()
        self._times.append((int(times.min()), int(times.max())))
        for name in rows.column_names:
            values = _single(rows[name])
            while pa.types.is_list(values.type):
                self._digest.update(np.diff(values.offsets.to_numpy()).astype(np.int64).tobytes())
                values = values.flatten()
            if pa.types.is_string(values.type):
                self._digest.update("\0".join(values.to_pylist()).encode())
            else:
                self._digest.update(np.ascontiguousarray(values.to_numpy(zero_copy_only=False)).view(np.uint8).data)
            if name not in (USER, ITEM, TIME, TARGET, *self._learned) and len(values):
                self._cardinality[name] = max(self._cardinality.get(name, 0), pc.max(values).as_py() + 1)

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            users, events = self._open
            self._files.append(FileInfo(self._part(), users, events, self._writer.size, self._writer.crc32))
            self._writer = None

    def write_table(self, name: str, table: pa.Table) -> None:
        """Add a table beside the users: a vocabulary."""
        with parquet.Writer(f"{self.place}/{name}", table.schema, compression="zstd") as writer:
            writer.write(table)
        self._tables[name] = writer.crc32

    def describe_event_features(self, features: Sequence[Feature]) -> None:
        """What was learned of features of events that are not ids, before anything is written."""
        self._learned = {feature.name: feature for feature in features}
        if features:
            self._digest.update(f"event {tuple(features)}".encode())

    def describe_features(self, owner: Owner, about: OwnedFeatures) -> None:
        """What ``dataset.json`` says of the features of items or users, whose tables are written, and no users yet."""
        self._owned[f"{owner}_features"] = about
        self._digest.update(f"{owner} {self._tables[f'{owner}-features.parquet']} {about.features}".encode())

    def finish(self, items: int, skipped_rows: dict[str, int], vocabularies: frozenset[str]) -> DatasetInfo:
        """Write ``dataset.json`` and put the dataset in its place."""
        for work in self._working:
            work.result()
        self._close_file()
        if not self._files or self._schema is None:
            raise DataError(f"nothing to write to {self.output}: no events are left after filtering")
        features = []
        for name in self._schema.names:
            if name in self._learned:
                features.append(self._learned[name])
            elif name not in (USER, ITEM, TIME, TARGET):
                multiple = pa.types.is_list(self._schema.field(name).type.value_type)
                features.append(Feature(name, multiple, self._cardinality.get(name, 0), name in vocabularies))
        lengths = np.concatenate(self._lengths)
        info = DatasetInfo(
            version=VERSION,
            log=self.log,
            users=len(lengths),
            items=items,
            events=int(lengths.sum()),
            first_time=min(first for first, _ in self._times),
            last_time=max(last for _, last in self._times),
            has_target=TARGET in self._schema.names,
            features=tuple(features),
            files=tuple(self._files),
            tables=self._tables,
            length_histogram=histogram(lengths),
            skipped_rows=skipped_rows,
            source=self.source,
            fingerprint=self._digest.hexdigest()[:32],
            **self._owned,
        )
        filesystem, inside = resolve(f"{self.place}/{INFO}")
        with filesystem.open_output_stream(inside) as file:
            file.write(info.to_json().encode())
        if self._local is not None:
            self._local.commit()
        return info

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for pool in (self._writing, self._noting):
            pool.shutdown(wait=True, cancel_futures=kind is not None)
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if self._local is not None:
                self._local.end()
