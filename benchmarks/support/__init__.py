"""Shared code for the entries in `benchmarks/`: the peer's packages, persistent processes, and
workloads."""
