"""Loss, negatives, optimizers, loop, checkpoint."""
