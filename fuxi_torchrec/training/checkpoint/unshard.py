"""A checkpoint as plain tensors: read on one rank, without TorchRec."""

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from fuxi_torchrec.artifacts import NewDirectory, follow_umask
from fuxi_torchrec.events.features import OWNERS
from fuxi_torchrec.training.checkpoint.info import CheckpointError, check_file, read_info
from fuxi_torchrec.training.checkpoint.reader import CheckpointReader
from fuxi_torchrec.training.run_directory import CONFIG, ITEMS

WEIGHTS = "model.safetensors"


def plain_name(name: str) -> str | None:
    """What a tensor of a checkpoint is called outside; None for what belongs to training only.

    Example:
        >>> plain_name("model.items.embedding_bags.item_table.weight")
        'item_table'
        >>> plain_name("model.head.encoder.blocks.0.in_proj")
        'encoder.blocks.0.in_proj'
    """
    if found := re.fullmatch(r"model\.(?:items|(?:item_|user_)?features)\.embedding_bags\.([^.]+)\.weight", name):
        return found[1]
    parts = ("encoder", "task", *(f"{owner}_projection" for owner in OWNERS))
    kept = tuple(f"model.head.{part}." for part in parts)
    return name.removeprefix("model.head.") if name.startswith(kept) else None


def read_plain(checkpoint: Path, prefix: str = "") -> dict[str, Tensor]:
    """All weights of a checkpoint whose plain names begin so, by these; its files are checked first."""
    for name, (size, crc) in read_info(checkpoint).files.items():
        check_file(checkpoint, name, size, crc)
    reader = CheckpointReader(checkpoint)
    state = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in reader.tensors().items()
        if (plain := plain_name(name)) and plain.startswith(prefix)
    }
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that this is one rank
            load(dict(state), storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # not an Exception
        raise CheckpointError(f"{checkpoint}: the checkpoint cannot be read: {error}") from None
    return {str(plain_name(name)): value for name, value in state.items()}


def unshard(run: Path, checkpoint: Path, output: Path) -> dict[str, Tensor]:
    """Write a checkpoint's weights as one safetensors file, with the run's configuration and items beside it."""
    with NewDirectory(output) as place:
        info = read_info(checkpoint)
        weights = read_plain(checkpoint)
        metadata = {"checkpoint": checkpoint.name, "progress": json.dumps(dataclasses.asdict(info.progress))}
        try:
            save_file(weights, place / WEIGHTS, metadata)
        except SafetensorError as error:  # a full disk, most likely
            raise CheckpointError(f"{output}: the weights cannot be written: {error}") from None
        follow_umask(place / WEIGHTS)
        for name in (CONFIG, ITEMS):
            shutil.copyfile(run / name, place / name)
    return weights
