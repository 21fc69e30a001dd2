"""Reading a checkpoint's tensors, and nothing else that somebody may have put into it.

torch.distributed.checkpoint keeps its ``.metadata`` as a pickle, and a pickle is a program. It is read here by one that
may make the objects of such a description and call nothing else; files that it names must be the checkpoint's own.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fuxi_torchrec.training.checkpoint.info import METADATA, CheckpointError, check_file, read_info

_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    *((f"{_CHECKPOINT}.metadata", name) for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((f"{_CHECKPOINT}.metadata", name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
_TYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in _TYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint's tensors; its other files than ``.metadata`` were checked before."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        files, where = read_info(path).files, path / METADATA
        check_file(path, METADATA, *files[METADATA])
        try:
            with where.open("rb") as file:
                self.metadata = _Unpickler(file).load()
            _check(self.metadata, files)
        except Exception as error:  # whatever a wrong pickle does
            raise CheckpointError(
                f"{where}: not the description of a checkpoint of this software: {error}: do not use it"
            ) from None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """What the checkpoint has, by name."""
        return self.metadata.state_dict_metadata


def _check(found: Any, files: dict[str, tuple[int, int]]) -> None:
    """Tensors, in files of the checkpoint, and nothing else: other entries would be pickles of their own."""
    if not isinstance(found, Metadata):
        raise ValueError(f"a {type(found).__name__}")
    for name, about in found.state_dict_metadata.items():
        if not isinstance(about, TensorStorageMetadata):
            raise ValueError(f"{name} is a {type(about).__name__}, not a tensor")
    for index, place in found.storage_data.items():
        if place.transform_descriptors or place.relative_path not in files:
            raise ValueError(f"{index.fqn} is in {place.relative_path!r}, which is no file of the checkpoint")
