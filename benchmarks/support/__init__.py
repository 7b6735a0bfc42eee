"""Shared code of the entries in `benchmarks/`: the peer's packages, processes that stay up, and
workloads."""
