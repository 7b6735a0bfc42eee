"""Benchmark suites for cluster operators: measurements, their results, a regression gate between
two runs, and reports."""
