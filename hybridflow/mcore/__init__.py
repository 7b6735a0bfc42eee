"""The only room that imports megatron: build, forward/backward, log-probs, checkpoints, and what Megatron needs to run
without CUDA.

Import order matters: what `bootstrap` does must come before anything of megatron is imported, so this package imports
it first.
"""

import hybridflow.mcore.bootstrap  # noqa: F401
