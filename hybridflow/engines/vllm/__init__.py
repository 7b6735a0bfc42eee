"""Engines backed by vLLM. The only package that imports vllm. This file imports nothing, because
vLLM's own processes import parts of the package (`door`, `worker`).
"""

# responses do not include sampling supports; read by the configuration check
TELLS_SUPPORT = False
