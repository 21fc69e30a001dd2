"""Checkpoints: complete or absent, loadable on any number of ranks and under any sharding."""
