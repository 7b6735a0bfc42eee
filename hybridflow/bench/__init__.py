"""Benchmark suites for cluster operators: measurements, results, a regression gate that compares
two runs, and reports."""
