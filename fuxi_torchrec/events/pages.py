"""Page checksums of Parquet files that others wrote: DuckDB reads pages without looking at them.

They are optional; Spark writes them, pyarrow if asked to. They cover the pages, not their headers nor the footer.
"""

import os
import zlib
from collections.abc import Collection

import duckdb

from fuxi_torchrec.events.errors import DataError

_SIZE, _CRC32 = 3, 4  # fields of a page header
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}  # bytes of Thrift's compact types: true, false, byte, double
_BINARY, _LIST, _SET, _STRUCT = 8, 9, 10, 12


def rows_and_columns(path: str, columns: Collection[str]) -> tuple[int, list[str]]:
    """How many rows a Parquet file has, and the names of its columns; the pages of some columns are checked."""
    with duckdb.connect() as connection:
        try:
            rows = connection.execute("SELECT num_rows FROM parquet_file_metadata(?)", [path]).fetchall()
            chunks = connection.execute(
                "SELECT path_in_schema, dictionary_page_offset, data_page_offset, total_compressed_size "
                "FROM parquet_metadata(?)",
                [path],
            ).fetchall()
            names = connection.execute(f"DESCRIBE SELECT * FROM read_parquet({_quoted(path)})").fetchall()
        except duckdb.Error as error:
            what = str(error).split("\n")[0]
            raise DataError(f"{path}: not a readable Parquet file, perhaps cut short: {what}") from None
    length = os.path.getsize(path)
    with open(path, "rb") as file:
        for name, *offsets, size in chunks:
            start = min((offset for offset in offsets if offset), default=None)  # 0 and null stand for none
            if name.split(", ")[0] in columns and start is not None:
                try:
                    if not 0 <= start <= start + size <= length:
                        raise ValueError("there is no such part")
                    checked = _check(os.pread(file.fileno(), size, start))
                except (IndexError, KeyError, ValueError) as error:
                    where = f"column {name}, bytes {start:,} to {start + size:,}"
                    raise DataError(f"{path}: damaged, {where}: {error or 'no page'}; take another copy") from None
                if not checked:
                    break  # of a writer that writes none
    return sum(int(row[0]) for row in rows), [str(row[0]) for row in names]


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "''") + "'"


def _check(chunk: bytes) -> bool:
    """Whether the pages have checksums; a ValueError if one is wrong."""
    at = 0
    while at < len(chunk):
        fields, at = _struct(chunk, at)
        size, crc32 = fields[_SIZE], fields.get(_CRC32)
        if crc32 is None:
            return False
        if zlib.crc32(chunk[at : at + size]) != crc32 & 0xFFFFFFFF:
            raise ValueError("a page is not what its checksum says")
        at += size
    return True


def _struct(data: bytes, at: int) -> tuple[dict[int, int], int]:
    """The integers of a struct in Thrift's compact protocol, by field, and where it ends."""
    found, field = {}, 0
    while (head := data[at]) != 0:
        kind, at = head & 15, at + 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _integer(data, at)
        if kind in (4, 5, 6):
            found[field], at = _integer(data, at)
        else:
            at = _skip(data, at, kind)
    return found, at + 1


def _skip(data: bytes, at: int, kind: int) -> int:
    if kind == _STRUCT:
        return _struct(data, at)[1]
    if kind == _BINARY:
        size, at = _varint(data, at)
        return at + size
    if kind in (_LIST, _SET):
        size, kind, at = data[at] >> 4, data[at] & 15, at + 1
        if size == 15:
            size, at = _varint(data, at)
        for _ in range(size):
            at = _integer(data, at)[1] if kind in (4, 5, 6) else _skip(data, at, kind)
        return at
    return at + _FIXED[kind]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
