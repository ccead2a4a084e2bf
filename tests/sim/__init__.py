"""Deterministic simulation of the lease protocol's real cores. `python -m sim` runs it."""
