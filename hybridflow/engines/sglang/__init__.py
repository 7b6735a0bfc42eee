"""SGLang as an engine. The only package that imports sglang.

Importing this package imports nothing: SGLang's own processes import it early, through the entry
points of `cpu_plugin`.
"""
