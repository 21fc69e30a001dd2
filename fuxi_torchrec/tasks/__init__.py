"""From encoder outputs to losses, scores and metrics. No TorchRec."""
