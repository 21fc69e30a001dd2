"""TorchRec's training pipelines and optimizers of tables, for those above who do not import TorchRec."""

from typing import Literal

import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

__all__ = ["RowWiseAdagrad", "ShardedModel", "make_pipeline"]

ShardedModel = DistributedModelParallel


def make_pipeline(
    kind: Literal["auto", "base", "sparse_dist"],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> TrainPipelineBase | TrainPipelineSparseDist:
    """``sparse_dist`` sends the next batch's ids while the current one is computed; it pays on accelerators."""
    if kind == "auto":
        kind = "base" if device.type == "cpu" else "sparse_dist"
    pipeline = TrainPipelineSparseDist if kind == "sparse_dist" else TrainPipelineBase
    return pipeline(model, optimizer, device)
