"""vLLM as an engine. The only package that imports vllm.

Importing this package imports nothing: vLLM's own processes import parts of it (`door`, `worker`).
"""

# responses do not include supports; the configuration check reads this
TELLS_SUPPORT = False
