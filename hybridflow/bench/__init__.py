"""Benchmark suites for those who run clusters: measurements, their results, a gate between two
runs, and reports."""
