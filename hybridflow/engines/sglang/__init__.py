"""Engines backed by SGLang. The only package that imports sglang. This file imports nothing,
because SGLang's own processes import it early, through the entry points of `cpu_plugin`.
"""
