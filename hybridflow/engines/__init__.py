"""Rollout engines: launch, HTTP client, weight groups and the CPU platform plugin. The only room that may import
sglang.

Importing this package imports neither sglang nor torch: SGLang itself imports it (entry points) very early in each of
its processes.
"""
