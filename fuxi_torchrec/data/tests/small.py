"""Small datasets for tests, written as the pipelines write them or by hand."""

import dataclasses

import numpy as np
import pyarrow as pa

from fuxi_torchrec.data.dataset import INFO, Dataset
from fuxi_torchrec.data.writer import DatasetWriter
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.log import LogSpec


def make_dataset(path, histories, items=None, block_users=3, feature=None, texts=None):
    """A dataset of (items, times[, weights]) histories, ``block_users`` users to a row group.

    With ``texts`` there is a feature "action" of text, a, b, c or d by the item, whose vocabulary is these texts.
    """
    items = items or int(max((max(h[0]) for h in histories if len(h[0])), default=1))
    with DatasetWriter(path, LogSpec(), {"test": True}) as out:
        for begin in range(0, len(histories), block_users):
            part = histories[begin : begin + block_users]
            lengths = [len(h[0]) for h in part]
            columns = {
                "user_id": np.repeat(np.arange(begin, begin + len(part)) * 10, lengths),
                "item": np.concatenate([h[0] for h in part]).astype(np.int32),
                "timestamp": np.concatenate([h[1] for h in part]).astype(np.int64),
            }
            if len(histories[0]) > 2:
                columns["target"] = np.concatenate([h[2] for h in part]).astype(np.float32)
            if feature == "single":
                columns["action"] = columns["item"] % 4
            if texts:
                columns["action"] = np.array([1 + texts.index("abcd"[i % 4]) for i in columns["item"]], np.int32)
            table = pa.table(columns)
            if feature == "multiple":
                table = table.append_column(
                    "tags", pa.array([[i] * (i % 3) for i in columns["item"].tolist()], pa.list_(pa.int64()))
                )
            out.write(table)
        index = np.arange(1, items + 1, dtype=np.int32)
        out.write_table(
            "items.parquet", pa.table({"item_id": index * 100, "index": index, "count": np.ones(items, np.int64)})
        )
        if texts:
            known = pa.table({"value": texts, "index": pa.array(range(1, len(texts) + 1), pa.int32())})
            out.write_table("feature-action.parquet", known)
        out.finish(items, {}, frozenset({"action"} if texts else ()))
    return Dataset.open(path)


def random_histories(seed, users, longest, items=50, weights=False):
    generator = np.random.default_rng(seed)
    histories = []
    for _ in range(users):
        n = int(generator.integers(1, longest + 1))
        history = [generator.integers(1, items + 1, n), 1_600_000_000 + np.sort(generator.integers(0, 10_000, n))]
        if weights:
            history.append(generator.choice([0.0, 1.0, 2.5], n))
        histories.append(tuple(history))
    return histories


def replace_rows(dataset, rows, name="part-00000.parquet", block_users=10**6):
    """Put other rows into a dataset's file, as something that is not the writer might."""
    with parquet.Writer(dataset.file(name), rows.schema) as out:
        for begin in range(0, len(rows), block_users):
            out.write(rows.slice(begin, block_users))
    info = dataset.info
    files = tuple(
        dataclasses.replace(f, users=len(rows), size=out.size, crc32=out.crc32) if f.name == name else f
        for f in info.files
    )
    users = sum(f.users for f in files)
    return describe(dataset, files=files, users=users, length_histogram={"<=10": users})


def replace_table(dataset, name, table):
    """Put another table into a dataset."""
    with parquet.Writer(dataset.file(name), table.schema) as out:
        out.write(table)
    return describe(dataset, tables={**dataset.info.tables, name: out.crc32})


def describe(dataset, **changes):
    """Write another ``dataset.json``."""
    with open(dataset.file(INFO), "w") as file:
        file.write(dataclasses.replace(dataset.info, **changes).to_json())
    return Dataset.open(dataset.path)
