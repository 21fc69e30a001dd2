"""The model's weights in an export: every table as safetensors, recommendable items as Parquet."""

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.artifacts import follow_umask
from fuxi_torchrec.distributed import raise_on_all_ranks, run_on_rank_0
from fuxi_torchrec.embeddings.sharding import LocalPart, local_parts
from fuxi_torchrec.evaluation.loading import own_dataset
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.features import OWNERS
from fuxi_torchrec.export.bundle import (
    DISPLAY,
    ENCODER,
    ITEM_TABLE,
    ITEMS,
    OTHER_ITEMS,
    REPEATS,
    TABLES,
    USER_ROWS,
    ExportError,
    FileEntry,
    projection_name,
    scaled,
)
from fuxi_torchrec.export.job import ExportJob, plain_ids, summed
from fuxi_torchrec.export.parts import part_name, write_rows
from fuxi_torchrec.export.programs import detached

_ITEM_ROWS = 2**16  # of a row group of items


def write_tables(job: ExportJob) -> None:
    """All tables as one safetensors file, every rank writing its own rows into it."""
    parts = _own_rows(job)
    tables = {table.name: (table.rows, table.dim) for table in job.run.tables.all}
    tables |= {name: (weight.shape[0], weight.shape[1]) for name, weight in _projections(job).items()}
    header, begins, size = _safetensors_header(tables)
    path = job.directory / TABLES
    with raise_on_all_ranks("writing the weights"):
        if job.first:
            with path.open("wb") as file:
                file.write(header)
                file.truncate(size)
            _save(job, ENCODER, detached(job.run.encoder).state_dict())
            if job.window:
                _save(job, REPEATS, job.run.module.task.exported_weights())
    dist.barrier()
    with raise_on_all_ranks("writing the tables"), path.open("r+b") as file:
        for part in parts:
            count, dim = part.tensor.shape
            file.seek(begins[part.table] + part.first_row * dim * 4)
            for begin in range(0, count, _ITEM_ROWS):
                file.write(part.tensor[begin : begin + _ITEM_ROWS].detach().float().cpu().contiguous().numpy().data)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()


def _save(job: ExportJob, name: str, weights: Mapping[str, Tensor]) -> None:
    save_file({key: value.detach().cpu().contiguous() for key, value in weights.items()}, job.directory / name)
    follow_umask(job.directory / name)
    job.wrote(name)


def _own_rows(job: ExportJob) -> list[LocalPart]:
    """Rows that this rank writes: its own of sharded tables, a share of those that every rank holds: a collective.

    Those of items have their features added, and items without a row have that of unknown ones.
    """
    tables, found = job.run.tables, []
    if tables.has_item_features:
        found.append(_composed(job))
    if job.first:
        found += [LocalPart(name, weight, 0, 0) for name, weight in _projections(job).items()]
    for part in local_parts(job.run.model):
        (table,) = (table for table in tables.all if table.name == part.table)
        if part.table == ITEM_TABLE and tables.has_item_features:
            continue
        if table.sharding == "data_parallel":
            share = -(-table.rows // job.world.size)
            begin = min(share * job.world.rank, table.rows)
            part = dataclasses.replace(part, tensor=part.tensor[begin : begin + share], first_row=begin)
        found.append(part)
    return found


def _projections(job: ExportJob) -> dict[str, Tensor]:
    """Weights of the projections, by their names among the tables."""
    head = job.run.module.head
    layers = (head.event_projection, head.item_projection, head.user_projection)
    found = zip(OWNERS, layers, strict=True)
    return {projection_name(owner): layer.weight for owner, layer in found if layer is not None}


def write_user_rows(job: ExportJob) -> None:
    """What the features of this rank's share of the users add to their queries: a collective."""
    about, world, reader = job.run.lookups.users, job.world, job.run.maker.reader
    if about is None:
        return
    users = np.flatnonzero(about.table.filled)  # row 0 is of nobody
    share = -(-len(users) // world.size)
    own = users[share * world.rank : share * (world.rank + 1)]
    dim = job.run.config.model.dim
    rows = job.run.module.user_lookup().rows(torch.from_numpy(own), dim, world.device, about)
    with raise_on_all_ranks("writing features of users"):
        if len(own):
            write_rows(job.directory / part_name(USER_ROWS, world.rank), plain_ids(reader.ids_of(own - 1)), rows.cpu())
            job.wrote(part_name(USER_ROWS, world.rank))


def _composed(job: ExportJob) -> LocalPart:
    """This rank's share of the items' rows, features included: a collective."""
    table, world = job.run.tables.items, job.world
    share = -(-table.rows // world.size)
    ids = np.arange(min(share * world.rank, table.rows), min(share * (world.rank + 1), table.rows))
    first, ids = int(ids[0]) if len(ids) else 0, np.where(job.run.maker.items.seen[ids], ids, 0)
    lookup = job.run.module.item_lookup()
    rows = lookup.rows(torch.from_numpy(ids), table.dim, world.device, job.run.lookups.items)
    return LocalPart(ITEM_TABLE, rows, first, 0)


def model_id(job: ExportJob) -> str:
    """A hash of the weights."""

    def read() -> str:
        digest = hashlib.sha256(json.dumps(strict_yaml.to_dict(job.run.config)["model"]).encode())
        if job.window:
            digest.update(json.dumps(job.about["repeats"]).encode())
        for name in (ENCODER, TABLES, *([REPEATS] if job.window else [])):
            size = crc = 0
            with (job.directory / name).open("rb") as file:
                while block := file.read(2**22):
                    digest.update(block)
                    size, crc = size + len(block), zlib.crc32(block, crc)
            job.files[name] = FileEntry(size, crc)
        return digest.hexdigest()[:16]

    found = [run_on_rank_0(job.world, "reading the weights back", read)]  # all tables: that may take long
    dist.broadcast_object_list(found, 0)
    return cast(str, found[0])


def write_items(job: ExportJob) -> int:
    """Recommendable items of this rank's rows; how many there are in all."""
    known, vocabulary, count = job.run.maker.items.seen, job.run.vocabulary, 0
    parts = _own_rows(job)
    with raise_on_all_ranks("writing items"):
        (part,) = (part for part in parts if part.table == ITEM_TABLE)
        shown = _display(job)
        name = part_name(ITEMS, job.world.rank)
        dim = part.tensor.shape[1]
        ids = plain_ids(vocabulary.ids)
        columns = {"item_id": ids.type, "index": pa.int32(), "embedding": pa.list_(pa.float32(), dim)}
        schema = pa.schema({**columns, **{DISPLAY + name: pa.string() for name in shown}})
        with parquet.Writer(job.directory / name, schema) as writer:
            for begin in range(0, len(part.tensor), _ITEM_ROWS):
                rows = part.tensor[begin : begin + _ITEM_ROWS].detach()
                index = np.arange(part.first_row + begin, part.first_row + begin + len(rows))
                index = index[known[index]]
                chosen = torch.from_numpy(index - part.first_row - begin)
                vectors = scaled(rows[chosen].float().cpu(), job.similarity)
                if not vectors.isfinite().all():
                    raise ExportError(f"{job.run.checkpoint}: the item table holds values that are not finite")
                embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors.numpy().reshape(-1)), dim)
                place = pa.array(index - 1)
                values = [ids.take(place), pa.array(index, pa.int32()), embedding]
                writer.write(pa.table([*values, *(column.take(place) for column in shown.values())], schema=schema))
                count += len(index)
        job.wrote(name)
    return summed(count)


def _display(job: ExportJob) -> dict[str, pa.ChunkedArray]:
    """Columns of items that are shown, by name."""
    run = job.run
    if run.lookups.items is None or not run.dataset.info.item_features.file.display:
        return {}
    table = own_dataset(run.config, run.info, run.dataset, "display columns").display()
    return {name: table[name] for name in table.column_names}


def write_other_items(job: ExportJob) -> None:
    """Items of the dataset that the model does not know: their events are part of histories, where those of items that
    the dataset left out are not. Nothing if it leaves none out.
    """
    info = job.run.dataset.info
    if not info.log.drops_rare_items:
        return
    there = job.run.dataset.vocabulary()
    ids = plain_ids(there.ids)
    known = plain_ids(job.run.vocabulary.ids).filter(pa.array(job.run.maker.items.seen[1:]))
    others = pc.and_(pa.array(there.counts > 0), pc.invert(pc.is_in(ids, value_set=known)))
    parquet.write_table(job.directory / OTHER_ITEMS, pa.table({"item_id": ids.filter(others)}))
    job.wrote(OTHER_ITEMS)


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
