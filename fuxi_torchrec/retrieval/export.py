"""A run's vectors, states and programs as files that need no TorchRec.

Every process writes what it has: its rows of the tables, its items, its users. Only the FAISS index, the encoder and
the programs are written by process 0, the index from the items' files.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import save_file

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.data.filesystem import read_bytes
from fuxi_torchrec.distributed import failing_together
from fuxi_torchrec.embeddings.sharding import LocalPart, local_parts
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.retrieval import index as indices
from fuxi_torchrec.retrieval.loading import Loaded
from fuxi_torchrec.retrieval.programs import detached, write_programs
from fuxi_torchrec.retrieval.shares import ProgressLines, Shares, on_first
from fuxi_torchrec.serving.bundle import (
    ENCODER,
    HISTORIES,
    INDEX,
    ITEM_TABLE,
    ITEMS,
    MANIFEST,
    PROGRAMS,
    SIDES,
    STATES,
    TABLES,
    USERS,
    ExportError,
    FileEntry,
    Manifest,
    SideTable,
    describe_file,
    scaled,
    write_manifest,
)
from fuxi_torchrec.serving.histories import Column, Histories, Ragged, bounds_of
from fuxi_torchrec.serving.parts import Users, part_name, sync, write_histories, write_users
from fuxi_torchrec.serving.states import TRAILER_BYTES, StateFile
from fuxi_torchrec.serving.times import NAMES, PER_SECOND, YEAR, parse_time, show_time

logger = get_logger(__name__)

Ints = NDArray[np.int64]

INT8_INDEX = "index-int8.faiss"
STATE_MIN_EVENTS = 2000
RULES = {
    "score": "inner product of embeddings, over the temperature; items with equal scores are in no particular order",
    "rank": "a target's rank in evaluation is 1 + the number of other items with a strictly higher score",
    "as_of": "users are asked at as_of, which is not before any event that was encoded",
    "anchors": "a user's sequence is its last max_length events; anchor_time is the first one's time, anchor_count the "
    "number of events before it, events the number encoded",
    "states": "users with at least state_min_events encoded events have a state; state_row is -1 for others",
    "items": "index 0 is an item nobody knows: part of histories, never recommended",
    "programs": "a state is (count, pending_time, pending, one tensor per channel), users first",
}

_AHEAD = 100  # years after the data's last event that users can be asked at
_TOKENS = 2**15  # events of a batch on a process
_STATE_BYTES = 2**27  # of a batch's states, about
_PART_EVENTS, _PART_USERS = 2**22, 2**16  # of a file of users
_ITEM_ROWS = 2**16  # of a row group of items


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    Attributes:
        as_of: when users are asked: a number in the data's unit, or an ISO time; by default the latest event's.
        truncate: leave events after as_of out; else such an as_of is refused.
        state_min_events: users with fewer encoded events get no state.
        index: write a FAISS index.
        exact_items: larger catalogues get an approximate index.
        quantize: an int8 index beside the other.
        programs: write portable programs.
        recall_users: whose searches are compared with exact search.
    """

    as_of: str | None = None
    truncate: bool = False
    state_min_events: int = STATE_MIN_EVENTS
    index: bool = True
    exact_items: int = indices.EXACT_ITEMS
    quantize: Literal["int8"] | None = None
    programs: bool = True
    recall_users: int = 500

    def __post_init__(self) -> None:
        if self.state_min_events < 1:
            raise ExportError(f"--state-min-events must be at least 1, not {self.state_min_events}")
        if self.exact_items < 0:
            raise ExportError(f"--exact-items must not be negative, but is {self.exact_items}")


def check_output(output: Path) -> None:
    """Refuse to write where something is."""
    if output.exists():
        raise ExportError(f"{output} exists: an export is never written over another, name a new directory")


def choose_as_of(run: Loaded, options: ExportOptions) -> int:
    """When users are asked; refused if it cannot be meant."""
    info = run.dataset.info
    if options.as_of is None:
        return info.last_time
    as_of, unit = parse_time(options.as_of, info.time_unit), info.time_unit
    first, latest = info.first_time, info.last_time + _AHEAD * YEAR * PER_SECOND[unit]
    if not first <= as_of <= latest:
        for other, per_second in PER_SECOND.items():
            if first <= as_of * PER_SECOND[unit] // per_second <= latest:
                raise ExportError(f"--as-of {as_of} looks like {NAMES[other]}: the data's times are in {NAMES[unit]}")
        if as_of > latest:
            raise ExportError(
                f"--as-of {as_of} is over {_AHEAD} years after the data, whose times are in {NAMES[unit]}"
            )
        raise ExportError(
            f"--as-of {as_of} ({show_time(as_of, unit)}) is before the data's first event, {first} "
            f"({show_time(first, unit)}): times are in {NAMES[unit]}"
        )
    if as_of < info.last_time and not options.truncate:
        raise ExportError(
            f"--as-of {as_of} ({show_time(as_of, unit)}) is before the data's last event, {info.last_time} "
            f"({show_time(info.last_time, unit)}): a user is not asked before an event that is known. Give a "
            "later time, or leave later events out with --truncate"
        )
    return as_of


def export(run: Loaded, output: str | Path, options: ExportOptions | None = None) -> Manifest:
    """Write an export: a collective, all or nothing.

    Args:
        run: the model and the data.
        output: a directory that does not exist, on storage that all processes share.
        options: what to write.
    """
    options, output = options or ExportOptions(), Path(output)
    with failing_together("preparing the export"):
        check_output(output)
        as_of = choose_as_of(run, options)
        if options.index:
            _check_faiss()
    with _aside(run, output) as directory:
        return _Exporter(run, directory, options, as_of).write()


def _check_faiss() -> None:
    try:
        import faiss  # noqa: F401
    except ImportError:
        raise ExportError(
            "faiss is not installed: pip install fuxi_torchrec[serve], or leave it out: --no-index"
        ) from None


@contextmanager
def _aside(run: Loaded, output: Path) -> Iterator[Path]:
    """A directory to write in, which becomes the output if all goes well and is removed if not."""
    partial = output.with_name(output.name + ".partial")
    first = run.world.rank == 0
    with failing_together("making the output directory"):
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in (ITEMS, USERS, HISTORIES, STATES, PROGRAMS):
                (partial / folder).mkdir(parents=True)
    dist.barrier()
    try:
        yield partial
        with failing_together("renaming the output"):
            if first:
                check_output(output)
                os.rename(partial, output)
                sync(output.parent)
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


class _Exporter:
    def __init__(self, run: Loaded, directory: Path, options: ExportOptions, as_of: int) -> None:
        self.run, self.directory, self.options, self.as_of = run, directory, options, as_of
        self.world, self.metric = run.world, run.config.loss.metric
        self.own_files: list[str] = []
        self.record_bytes = run.encoder.init_state(1).to_bytes().shape[1]
        pooling = {table.feature: table.pooling for table in run.tables.sides}
        self.sides = tuple(
            SideTable(side.name, side.multiple, pooling[side.name])
            for name in pooling
            for side in run.dataset.info.sides
            if side.name == name
        )

    @property
    def first(self) -> bool:
        return self.world.rank == 0

    def write(self) -> Manifest:
        """Everything; process 0 commits."""
        self._tables()
        model_id = self._model_id()
        items = self._items()
        self._side_values()
        users, states = self._users(model_id)
        index = self._index(items)
        if self.options.programs:
            self._programs()
        files = self._files()
        info, config = self.run.dataset.info, self.run.config
        manifest = Manifest(
            model=strict_yaml.to_dict(config)["model"],
            model_id=model_id,
            metric=self.metric,
            temperature=config.loss.temperature,
            dimension=config.model.dim,
            time_unit=info.time_unit,
            as_of=self.as_of,
            max_length=config.batch.max_length,
            state_min_events=self.options.state_min_events,
            state_bytes=self.record_bytes + TRAILER_BYTES,
            items=items,
            users=users,
            states=states,
            item_id_type=_id_type(self.run.vocabulary.ids.type),
            user_id_type=_id_type(self.run.maker.reader.ids_of(np.zeros(0, np.int64)).type),
            sides=self.sides,
            index=index,
            dataset=info.fingerprint,
            run={
                "name": self.run.directory.path.name,
                "checkpoint": self.run.checkpoint.name,
                "step": self.run.info.progress.step,
            },
            rules=RULES,
            files=files,
        )
        with failing_together("writing the manifest"):
            if self.first:
                write_manifest(self.directory, manifest)
        return manifest

    # --- weights -----------------------------------------------------------------------------------------------------

    def _tables(self) -> None:
        """All tables as one safetensors file, every process writing its own rows into it."""
        tables = {table.name: (table.rows, table.dim) for table in self.run.tables.all}
        header, begins, size = _safetensors_header(tables)
        path = self.directory / TABLES
        with failing_together("writing the weights"):
            if self.first:
                with path.open("wb") as file:
                    file.write(header)
                    file.truncate(size)
                state = detached(self.run.encoder).state_dict()
                save_file({name: value.contiguous() for name, value in state.items()}, self.directory / ENCODER)
                sync(self.directory / ENCODER)
                self.own_files += [TABLES, ENCODER]
        dist.barrier()
        with failing_together("writing the tables"), path.open("r+b") as file:
            for part in self._own_rows():
                count, dim = part.tensor.shape
                file.seek(begins[part.table] + part.first_row * dim * 4)
                for begin in range(0, count, _ITEM_ROWS):
                    file.write(part.tensor[begin : begin + _ITEM_ROWS].detach().float().cpu().contiguous().numpy().data)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()

    def _own_rows(self) -> list[LocalPart]:
        """Rows that this process writes: its own of divided tables, a share of those that every process holds."""
        found = []
        for part in local_parts(self.run.model):
            (table,) = (table for table in self.run.tables.all if table.name == part.table)
            if table.sharding == "data_parallel":
                share = -(-table.rows // self.world.size)
                begin = min(share * self.world.rank, table.rows)
                part = dataclasses.replace(part, tensor=part.tensor[begin : begin + share], first_row=begin)
            found.append(part)
        return found

    def _model_id(self) -> str:
        """Of the weights themselves, so that the same weights have the same."""
        found = [""]
        with failing_together("reading the weights back"):
            if self.first:
                digest = hashlib.sha256(json.dumps(strict_yaml.to_dict(self.run.config)["model"]).encode())
                for name in (ENCODER, TABLES):
                    with (self.directory / name).open("rb") as file:
                        while block := file.read(2**22):
                            digest.update(block)
                found = [digest.hexdigest()[:16]]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def _items(self) -> int:
        """Recommendable items of this process's rows; how many there are in all."""
        known, vocabulary, count = self.run.items.known, self.run.vocabulary, 0
        with failing_together("writing items"):
            (part,) = (part for part in self._own_rows() if part.table == ITEM_TABLE)
            name = part_name(ITEMS, self.world.rank)
            dim = part.tensor.shape[1]
            ids = _plain(vocabulary.ids)
            schema = pa.schema(
                {"item_id": ids.type, "index": pa.int32(), "embedding": pa.list_(pa.float32(), dim)}
            )  # fmt: skip
            with pq.ParquetWriter(self.directory / name, schema) as writer:
                for begin in range(0, len(part.tensor), _ITEM_ROWS):
                    rows = part.tensor[begin : begin + _ITEM_ROWS].detach()
                    index = np.arange(part.first_row + begin, part.first_row + begin + len(rows))
                    wanted = known[index]
                    index = index[wanted]
                    vectors = scaled(rows[torch.from_numpy(wanted)].float().cpu(), self.metric)
                    if not vectors.isfinite().all():
                        raise ExportError(f"{self.run.checkpoint}: the item table holds values that are not finite")
                    writer.write_table(_item_table(schema, ids.take(pa.array(index - 1)), index, vectors))
                    count += len(index)
            sync(self.directory / name)
            self.own_files.append(name)
        return _summed(count)

    def _side_values(self) -> None:
        """What text values of side features stand for, so that new events can be understood."""
        dataset, used = self.run.dataset, {side.name for side in self.sides}

        def work() -> None:
            for name in (side.name for side in dataset.info.sides if side.vocabulary and side.name in used):
                (self.directory / SIDES).mkdir(exist_ok=True)
                path = self.directory / SIDES / f"{name}.parquet"
                path.write_bytes(read_bytes(dataset.file(f"side-{name}.parquet")))
                sync(path)
                self.own_files.append(f"{SIDES}/{name}.parquet")

        on_first(self.world, "writing side features", work)

    # --- users -------------------------------------------------------------------------------------------------------

    def _users(self, model_id: str) -> tuple[int, int]:
        """Users, their histories and states; how many users and states there are in all."""
        run, max_length = self.run, self.run.config.batch.max_length
        with failing_together("reading the dataset"):
            lengths = run.maker.reader.lengths()
        rows = np.flatnonzero(lengths > 0)
        encoded = np.minimum(lengths[rows], max_length)
        self._show_states(encoded)
        shares = Shares.of(rows, encoded, self.world.size, _TOKENS, max(1, _STATE_BYTES // self.record_bytes))
        plan = [_parts(batches, encoded, rows) for batches in shares.batches]
        number = sum(max(each, default=-1) + 1 for each in plan[: self.world.rank])  # of this process's first part
        until = self.as_of if self.as_of < run.dataset.info.last_time else None
        own, progress, done, part = plan[self.world.rank], ProgressLines("encoded", len(rows), "users"), 0, None
        users = states = 0
        for step in range(len(shares.batches[0])):
            with failing_together("reading users"):
                batch, before = run.maker.histories(shares.batches[self.world.rank][step], max_length, until)
            state = run.states(batch)
            with failing_together("writing users"):
                if step < len(own):
                    part = part or _Part(self, number + own[step], model_id)
                    asked = torch.full((len(batch),), self.as_of, device=run.model.device)
                    vectors = scaled(run.encoder.query(state, asked), self.metric)
                    if not vectors.isfinite().all():
                        raise ExportError(f"{run.checkpoint}: the encoder's outputs are not finite")
                    part.add(batch, before, vectors.cpu().numpy(), state)
                    if step + 1 == len(own) or own[step + 1] != own[step]:
                        part.finish()
                        users, states, part = users + part.users, states + part.states, None
            done += sum(len(batches[step]) for batches in shares.batches)
            progress.show(done)
        return _summed(users), _summed(states)

    def _show_states(self, encoded: Ints) -> None:
        """Say how large the states will be, and refuse what does not fit."""
        least, size = self.options.state_min_events, self.record_bytes + TRAILER_BYTES
        count = int((encoded >= least).sum())
        logger.info(
            "states of %s users with at least %s events: %s MiB, %.1f KiB each",
            f"{count:,}",
            f"{least:,}",
            f"{count * size / 2**20:,.1f}",
            size / 2**10,
        )
        with failing_together("looking for room on disk"):
            free = shutil.disk_usage(self.directory).free
            if count * size > free:
                raise ExportError(
                    f"{self.directory}: {count * size / 2**30:,.1f} GiB of states, {free / 2**30:,.1f} GiB are free: "
                    "raise --state-min-events, or take another place"
                )

    # --- what process 0 adds -----------------------------------------------------------------------------------------

    def _index(self, items: int) -> dict[str, Any]:
        """FAISS's indices and what they find, from the files of all processes."""
        if not self.options.index:
            return {}
        dist.barrier()
        return on_first(self.world, "building the index", lambda: self._build_index(items)) or {}

    def _build_index(self, items: int) -> dict[str, Any]:
        dim = self.run.config.model.dim
        paths, users = (sorted((self.directory / folder).glob("*.parquet")) for folder in (ITEMS, USERS))
        queries = indices.sample_queries(users, self.options.recall_users, dim)
        exact = indices.nearest_scores(paths, queries, indices.NEAREST)
        found, about = indices.build(paths, items, dim, self.options.exact_items)
        about |= {"file": INDEX, "recall@100": indices.recall(found, queries, exact, paths), "queries": len(queries)}
        indices.write(found, self.directory / INDEX)
        self.own_files.append(INDEX)
        logger.info("%s index of %s items, recall@100 %.4f", about["kind"], f"{items:,}", about["recall@100"])
        del found
        if self.options.quantize == "int8":
            small = indices.build_int8(paths, items, dim)
            recall = indices.recall(small, queries, exact, paths)
            indices.write(small, self.directory / INT8_INDEX)
            self.own_files.append(INT8_INDEX)
            size = (self.directory / INT8_INDEX).stat().st_size
            about["int8"] = {"file": INT8_INDEX, "recall@100": recall, "recall_lost": 1.0 - recall, "bytes": size}
            logger.info("int8 index: %.1f MiB, recall@100 %.4f", size / 2**20, recall)
        return about

    def _programs(self) -> None:
        def work() -> None:
            worst = write_programs(detached(self.run.encoder), self.metric, self.directory / PROGRAMS)
            logger.info("portable programs differ from the encoder by at most %.1e", worst)
            self.own_files += [f"{PROGRAMS}/{path.name}" for path in sorted((self.directory / PROGRAMS).iterdir())]

        on_first(self.world, "exporting programs", work)

    def _files(self) -> dict[str, FileEntry]:
        """Sizes and checksums of all files, each process reading its own."""
        own: dict[str, FileEntry] = {}
        with failing_together("reading the export back"):
            own = {name: describe_file(self.directory / name) for name in self.own_files}
        everyone: list[dict[str, FileEntry]] = [{} for _ in range(self.world.size)]
        dist.all_gather_object(everyone, own)
        found = {name: entry for part in everyone for name, entry in part.items()}
        assert MANIFEST not in found
        return dict(sorted(found.items()))


class _Part:
    """A file of users, one of their histories and one of their states."""

    def __init__(self, exporter: _Exporter, number: int, model_id: str) -> None:
        self.exporter, self.number = exporter, number
        self.states_name = part_name(STATES, number, "bin")
        self.file = StateFile.create(exporter.directory / self.states_name, model_id, exporter.record_bytes)
        self._users: list[Users] = []
        self._histories: list[Histories] = []

    @property
    def users(self) -> int:
        return sum(map(len, self._users))

    @property
    def states(self) -> int:
        return int(sum((users.state_row >= 0).sum() for users in self._users))

    def add(self, batch: EventBatch, before: Ints, vectors: NDArray[np.float32], state: Any) -> None:
        """Users with their encoded events."""
        offsets = batch.offsets.numpy()
        ids = _plain(self.exporter.run.maker.reader.ids_of(batch.users.numpy()))
        users = Users.new(ids, vectors.shape[1])
        users.embedding, users.anchor_count, users.events = vectors, before, np.diff(offsets)
        users.as_of[:] = self.exporter.as_of
        times = batch.timestamps.numpy()
        users.anchor_time, users.last_time = times[offsets[:-1]], times[offsets[1:] - 1]
        kept = np.flatnonzero(users.events >= self.exporter.options.state_min_events)
        users.state_row[kept] = self.file.append(state.select(torch.from_numpy(kept)).to_bytes())
        self._users.append(users)
        sides = {side.name: _column(batch, side) for side in self.exporter.sides}
        self._histories.append(Histories(offsets, batch.items.numpy(), times, sides))

    def finish(self) -> None:
        """Write the files."""
        directory, number = self.exporter.directory, self.number
        self.file.close()
        sync(self.file.path)
        users = self._users[0]
        for more in self._users[1:]:
            users = users.stack(more)
        write_users(directory / part_name(USERS, number), users)
        write_histories(directory / part_name(HISTORIES, number), users.ids, Histories.stack(self._histories))
        self.exporter.own_files += [part_name(USERS, number), part_name(HISTORIES, number), self.states_name]


def _parts(batches: Sequence[Ints], encoded: Ints, rows: Ints) -> list[int]:
    """The part that each of a process's batches belongs to; batches without users, at the end, to none."""
    found, part, users, events = [], 0, 0, 0
    for batch in batches:
        if not len(batch):
            break
        size = int(encoded[np.searchsorted(rows, batch)].sum())
        if users and (users + len(batch) > _PART_USERS or events + size > _PART_EVENTS):
            part, users, events = part + 1, 0, 0
        users, events = users + len(batch), events + size
        found.append(part)
    return found


def _column(batch: EventBatch, side: SideTable) -> Column:
    feature = batch.sides[side.name]
    values = feature.values.numpy()
    return values if feature.lengths is None else Ragged(values, bounds_of(feature.lengths.numpy()))


def _item_table(schema: pa.Schema, ids: pa.Array, index: Ints, vectors: torch.Tensor) -> pa.Table:
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors.numpy().reshape(-1)), vectors.shape[1])
    return pa.table([ids, pa.array(index, pa.int32()), embedding], schema=schema)


def _safetensors_header(tables: dict[str, tuple[int, int]]) -> tuple[bytes, dict[str, int], int]:
    """A safetensors file of float32 tables: how it begins, where each table does, and its size."""
    about, begins, end = {}, {}, 0
    for name, (rows, dim) in tables.items():
        about[name] = {"dtype": "F32", "shape": [rows, dim], "data_offsets": [end, end + 4 * rows * dim]}
        begins[name], end = end, end + 4 * rows * dim
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: first + at for name, at in begins.items()}, first + end


def _plain(ids: pa.Array) -> pa.Array:
    """As ``int64`` or ``string``."""
    return ids.cast(pa.int64() if pa.types.is_integer(ids.type) else pa.string())


def _id_type(kind: pa.DataType) -> str:
    return "int64" if pa.types.is_integer(kind) else "string"


def _summed(count: int) -> int:
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)
