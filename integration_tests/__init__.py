"""Several processes, real TorchX launches, real files."""
