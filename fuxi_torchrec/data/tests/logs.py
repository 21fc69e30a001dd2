"""Event logs for tests, and what became of them."""

import pyarrow as pa
import pyarrow.parquet as pq

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.events import sources

HEADER = "user,item,time,action,weight"


def events(path, **more):
    return sources.events(str(path), "user", "item", "time", more.pop("time_unit", "s"), **more)


def write(path, lines, header=HEADER):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def read(path):
    """A dataset as {user: [(raw item, time), ...]}, in order, and the tables."""
    dataset = Dataset.open(path)
    tables = [pq.read_table(dataset.file(file.name)) for file in dataset.info.files]
    table = pa.concat_tables(tables)
    vocabulary = dataset.vocabulary()
    users = {}
    for row in table.to_pylist():
        users[row["user_id"]] = list(zip(vocabulary.raw(row["item"]), row["timestamp"], strict=True))
    return dataset, users, table


def write_small_log(path):
    t = 1_600_000_000
    lines = [
        f"7,a,{t + 5},click,1",
        f"3,b,{t},view,0",
        f"7,b,{t + 1},view,0",
        f"3,a,{t + 9},click,1",
        f"7,b,{t + 5},buy,2",
    ]
    return write(path, lines)
