"""Exact ranks on a sharded catalogue, ranking metrics, baselines."""
