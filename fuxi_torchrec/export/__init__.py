"""Distributed, after training: exact ranking on sharded tables, export."""
