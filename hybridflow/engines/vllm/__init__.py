"""vLLM as an engine, and the only room that imports vllm.

Importing this package imports nothing: vLLM's own processes import parts of it (`door`, `worker`).
"""

TELLS_SUPPORT = False  # answers do not say what their tokens were sampled among; read by the check of a configuration
