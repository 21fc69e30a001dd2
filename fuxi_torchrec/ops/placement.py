"""Tensors made on the host go to a device without waiting for it."""

import torch
from torch import Tensor


def placed(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; from pinned memory where there is a GPU: any other copy to it waits."""
    if device.type == "cuda" and torch.cuda.is_available():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
