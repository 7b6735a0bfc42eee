"""vLLM as an engine, and the only room that imports vllm.

Importing this package imports nothing: vLLM's own processes import parts of it (`door`, `worker`).
"""

# answers do not say what their tokens were sampled among; read by the check of a configuration
TELLS_SUPPORT = False
