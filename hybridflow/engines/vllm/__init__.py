"""Engines backed by vLLM. The only package that imports vllm. This file imports nothing, because
vLLM's own processes import parts of the package (`door`, `worker`).
"""

# responses do not include supports; the configuration check reads this
TELLS_SUPPORT = False
