"""Rollout engines: the protocol (`base`), restarts (`supervisor`), engines over several nodes
(`nodes`), and one package per kind.

Importing this package imports neither torch nor a kind's library: SGLang itself imports it (entry
points) very early in each of its processes.
"""
