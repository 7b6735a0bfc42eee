"""Shared code for the entries in `benchmarks/`: installation of the peer, persistent processes, and
workloads."""
