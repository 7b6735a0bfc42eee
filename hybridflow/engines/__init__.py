"""Rollout engines: the protocol (`base`), restarts (`supervisor`), engines that span several nodes
(`nodes`), and one package per kind of engine.

Importing this package must not import torch or an inference library, because SGLang imports it
(through entry points) very early in each of its processes.
"""
