"""Megatron backend: model construction, forward/backward, log-probs and checkpoints, with or
without CUDA.

The only package that imports megatron. Import order matters: `bootstrap` must run before any
megatron module is imported, so this package imports it first.
"""

import hybridflow.mcore.bootstrap  # noqa: F401
