"""Parquet files that prove themselves: no byte reaches Arrow before its checksum is found right.

Arrow's page checksums are written too, for others, but cover neither page headers nor the footer, and a damaged footer
can end the whole process inside Arrow. So checksums of everything stand before the footer, where others do not look:

    pieces | length and CRC-32 of each piece | number of pieces, CRC-32 of all but the pieces, tag | footer

The pieces are all that comes before, from the first byte on: page headers and pages.
"""

import io
import itertools
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.filesystem import resolve
from fuxi_torchrec.events.histories import bounds_of

_TAG = b"FUXICRC1"
_PIECE = np.dtype([("length", "<u4"), ("crc32", "<u4")])
_HEAD = struct.Struct("<II8s")
_END = 8  # bytes of a Parquet file behind the footer: its length, and the format's name
_TAIL = 2**16  # bytes read at first: most footers, with the checksums, are shorter


class Writer:
    """Writes a Parquet file; a context manager.

    Args:
        path: local or remote.
        schema: of the tables.
        options: of pyarrow's ParquetWriter, such as compression.

    Attributes:
        size, crc32: of the file when it is closed: its bytes, and the checksum that covers all others.
    """

    def __init__(self, path: str | Path, schema: pa.Schema, **options: Any) -> None:
        filesystem, inside = resolve(path)
        self._sink = _Sink(filesystem.open_output_stream(inside))
        self._writer = pq.ParquetWriter(self._sink, schema, write_page_checksum=True, **options)
        self.size = self.crc32 = 0

    def write(self, table: pa.Table) -> None:
        """Add a row group."""
        self._writer.write_table(table, row_group_size=max(1, len(table)))

    def close(self) -> None:
        if not self._sink.closed:
            self._sink.footer = b""
            self._writer.close()
            self.size, self.crc32 = self._sink.finish()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Sink(io.RawIOBase):
    """Notes the checksum of each piece on its way, and keeps the footer back until they are written."""

    def __init__(self, file: pa.NativeFile) -> None:
        self.file, self.pieces = file, list[tuple[int, int]]()
        self.footer: bytes | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self.file.tell())

    def write(self, data: Any) -> int:
        if self.footer is not None:
            self.footer += bytes(data)
        else:
            self.pieces.append((len(data), zlib.crc32(data)))
            self.file.write(data)
        return len(data)

    def finish(self) -> tuple[int, int]:
        """The file's size, and the checksum of its checksums and its footer."""
        assert self.footer is not None
        checks = np.array(self.pieces, _PIECE).tobytes()
        crc32 = zlib.crc32(self.footer, zlib.crc32(checks + len(self.pieces).to_bytes(4, "little")))
        self.file.write(checks + _HEAD.pack(len(self.pieces), crc32, _TAG) + self.footer)
        size = int(self.file.tell())
        self.file.close()
        self.close()
        return size, crc32


def write_table(path: str | Path, table: pa.Table, **options: Any) -> None:
    """A file of one table, in one row group."""
    with Writer(path, table.schema, **options) as writer:
        writer.write(table)


def checksum(path: str | Path, everything: bool = False) -> int:
    """The checksum of a file of :class:`Writer` that covers all others; with ``everything`` each of them is compared
    with its piece.
    """
    filesystem, inside = resolve(path)
    try:
        source = _Source(path, filesystem.open_input_file(inside))
        if everything:
            source.check()
        return source.crc32
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


def open_file(path: str | Path, crc32: int | None = None) -> pq.ParquetFile:
    """A file of :class:`Writer`, each part of which is checked when it is read.

    Args:
        path: local or remote.
        crc32: that the file must have, if it is known.
    """
    filesystem, inside = resolve(path)
    try:
        file = filesystem.open_input_file(inside)
        source = _Source(path, file)
        if crc32 not in (None, source.crc32):
            raise DataError(f"{path}: another file than the one that was written: put the right one there")
        return pq.ParquetFile(source, metadata=source.metadata)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


def read_table(path: str | Path, columns: Sequence[str], crc32: int | None = None) -> pa.Table:
    """Some columns of a file of :class:`Writer`, checked."""
    file = open_file(path, crc32)
    check_columns(path, file, columns)
    try:
        return file.read(columns=list(columns))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def check_columns(path: str | Path, file: pq.ParquetFile, columns: Sequence[str]) -> None:
    """An error if a column is not there."""
    there = file.schema_arrow.names
    missing = [name for name in columns if name not in there]
    if missing:
        raise DataError(f"{path}: no column {', '.join(missing)}; the columns are {', '.join(there)}")


class _Source(io.RawIOBase):
    """A file that gives only what it has checked."""

    def __init__(self, path: str | Path, file: pa.NativeFile) -> None:
        self._path, self._file, self._at, self._size = path, file, 0, file.size()
        self._tail = b""
        footer = _END + int.from_bytes(self._last(_END)[:4], "little")
        count, noted, tag = _HEAD.unpack(self._last(footer + _HEAD.size)[: _HEAD.size])
        if tag != _TAG:
            raise self._damaged()
        checks = count * _PIECE.itemsize
        whole = self._last(checks + _HEAD.size + footer)
        self.crc32 = zlib.crc32(whole[-footer:], zlib.crc32(whole[: checks + 4]))
        pieces = np.frombuffer(whole, _PIECE, count)
        self._edges = bounds_of(pieces["length"])
        self._crc32 = pieces["crc32"].tolist()
        if noted != self.crc32 or self._edges[-1] + len(whole) != self._size:
            raise self._damaged()
        self.metadata = pq.read_metadata(pa.BufferReader(whole[-footer:]))
        self._tail = b""

    def _last(self, size: int) -> bytes:
        """So many bytes at the file's end."""
        if size > self._size:
            raise self._damaged()
        if size > len(self._tail):
            length = min(max(size, _TAIL), self._size)
            self._tail = self._file.read_at(length, self._size - length)
        return self._tail[len(self._tail) - size :]

    def _damaged(self) -> DataError:
        return DataError(f"{self._path}: damaged, cut short, or not written by this software: make it again")

    def check(self) -> None:
        for begin, end in itertools.pairwise(self._edges.tolist()):
            self.seek(begin)
            self.read(end - begin)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> memoryview:
        """Whole pieces are read, whatever part of them is wanted."""
        begin = self._at
        end = self._at = int(self._edges[-1]) if size < 0 else begin + size
        first = int(np.searchsorted(self._edges, begin, side="right")) - 1
        last = int(np.searchsorted(self._edges, end))
        at = int(self._edges[first])
        data = memoryview(self._file.read_at(int(self._edges[min(last, len(self._crc32))]) - at, at))
        for piece in range(first, min(last, len(self._crc32))):
            a, b = (int(edge) - at for edge in self._edges[piece : piece + 2])
            if zlib.crc32(data[a:b]) != self._crc32[piece]:
                raise DataError(f"{self._path}: damaged at bytes {at + a:,} to {at + b:,}: make the file again")
        return data[begin - at : end - at]
