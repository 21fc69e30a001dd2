"""A file of user states: records of fixed size, found by their row, each with a checksum.

The file is a header of 4096 bytes and the records one after another. A record is a state's bytes
(:meth:`EncoderState.to_bytes`), their crc32, and flags, always 0, which the checksum covers too. A record that was
being written when the machine stopped fails its checksum and is reported by :meth:`StateFile.get`.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.export.bundle import ExportError
from fuxi_torchrec.schema import Record, read_json

MAGIC = b"FUXISTAT"
VERSION = 1
HEADER_BYTES = 4096
TRAILER_BYTES = 8  # crc32 and flags, uint32 each, little-endian

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class _Header(Record):
    """What a file of states says of itself."""

    model_id: str
    record_bytes: int
    version: int = VERSION

    def __post_init__(self) -> None:
        if not 0 < self.record_bytes < 2**40:
            raise ValueError(f"record_bytes must be positive, not {self.record_bytes}")


class StateFile:
    """States of one model in one file: written by appending to a new one, then read. Made by :meth:`create` or
    :meth:`open`.

    Attributes:
        model_id: of the weights the states belong to.
        record_bytes: of a state, without its checksum.
        slot_bytes: of a record in the file, its checksum included: ``state_bytes`` of the manifest.
    """

    def __init__(self, path: Path, model_id: str, record_bytes: int) -> None:
        self.path, self.model_id, self.record_bytes = path, model_id, record_bytes
        self.slot_bytes = record_bytes + TRAILER_BYTES
        self._mapped = self._map()

    def __len__(self) -> int:
        return len(self._mapped)

    # --- opening -----------------------------------------------------------------------------------------------------

    @staticmethod
    def create(path: str | Path, model_id: str, record_bytes: int) -> "StateFile":
        """A new file without records; it must not exist."""
        path = Path(path)
        about = json.dumps(asdict(_Header(model_id, record_bytes))).encode()
        try:
            with path.open("xb") as file:
                file.write((MAGIC + about).ljust(HEADER_BYTES, b"\0"))
        except FileExistsError:
            raise ExportError(f"{path} exists: states are never written over others, take another place") from None
        return StateFile(path, model_id, record_bytes)

    @staticmethod
    def open(path: str | Path, model_id: str | None = None, record_bytes: int | None = None) -> "StateFile":
        """An existing file; refused if it is not of this model, or its records are of another size, where given."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
        except OSError as error:
            raise ExportError(f"{path}: the states cannot be read: {error.strerror}") from None
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            raise ExportError(f"{path}: not a file of states, or cut short: export again")
        text = header[len(MAGIC) :].rstrip(b"\0")
        about = read_json(_Header, text, path, ExportError, "export again", version=("version", VERSION))
        if model_id is not None and about.model_id != model_id:
            raise ExportError(
                f"{path}: states of model {about.model_id}, not of {model_id}: a new model makes all states worthless, "
                "export again"
            )
        if record_bytes is not None and about.record_bytes != record_bytes:
            raise ExportError(
                f"{path}: states of {about.record_bytes} bytes, this encoder's have {record_bytes}: export again"
            )
        return StateFile(path, about.model_id, about.record_bytes)

    def close(self) -> None:
        """Let go of the file."""
        self._mapped = np.zeros((0, self.slot_bytes), np.uint8)

    def __enter__(self) -> "StateFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- records -----------------------------------------------------------------------------------------------------

    def append(self, records: Tensor) -> Ints:
        """Add states at the end, (B, record_bytes) uint8, of :meth:`EncoderState.to_bytes`; their rows."""
        first = len(self)
        rows = np.arange(first, first + len(records))
        if records.dtype != torch.uint8 or records.shape != (len(rows), self.record_bytes):
            raise ValueError(
                f"records must be uint8 of shape ({len(rows)}, {self.record_bytes}), "
                f"not {records.dtype} of {tuple(records.shape)}"
            )
        if len(rows):
            try:  # a full disk is an error here; written through the mapping it would end the process
                with self.path.open("r+b") as file:
                    file.seek(HEADER_BYTES + first * self.slot_bytes)
                    file.write(self._slots(records).data)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            self._mapped = self._map()
        return rows

    def get(self, rows: Sequence[int] | Ints | Tensor) -> tuple[Tensor, Tensor]:
        """Records of rows in the order wanted: (B, record_bytes) uint8, and (B,) which of them are whole.

        A record that is not whole must not be used: it was torn while being written, or damaged.
        """
        chosen: Ints = np.asarray(rows, dtype=np.int64).reshape(-1)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise ValueError(
                f"{self.path}: rows must be 0 to {len(self) - 1}, not {chosen.min()} to {chosen.max()}: the users and "
                "the states are not of one export"
            )
        slots: Bytes = np.ascontiguousarray(self._mapped[chosen])
        stored = np.ascontiguousarray(slots[:, self.record_bytes :]).view("<u4")[:, 0]
        valid = np.fromiter((_crc(slot) for slot in slots), np.uint32, len(slots)) == stored
        return torch.from_numpy(slots[:, : self.record_bytes].copy()), torch.from_numpy(valid)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _map(self) -> Bytes:
        """Map the whole records; what a stopped append left of one at the end is not counted."""
        records = (self.path.stat().st_size - HEADER_BYTES) // self.slot_bytes
        if records <= 0:  # nothing can be mapped
            return np.zeros((0, self.slot_bytes), np.uint8)
        return np.memmap(self.path, np.uint8, "r", HEADER_BYTES, (records, self.slot_bytes))

    def _slots(self, records: Tensor) -> Bytes:
        slots = np.zeros((len(records), self.slot_bytes), np.uint8)
        slots[:, : self.record_bytes] = records.cpu().numpy()
        trailers = np.zeros((len(records), 2), "<u4")
        trailers[:, 0] = [_crc(slot) for slot in slots]
        slots[:, self.record_bytes :] = trailers.view(np.uint8)
        return slots


def _crc(slot: Bytes) -> int:
    """Of the state's bytes and the flags."""
    return zlib.crc32(slot[-4:].data, zlib.crc32(slot[:-TRAILER_BYTES].data))
