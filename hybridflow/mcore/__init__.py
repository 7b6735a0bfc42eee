"""Megatron backend: model construction, forward/backward, log-probs and checkpoints, with or
without CUDA.

This is the only package that imports megatron. `bootstrap` must run before any megatron module is
imported, so this package imports it first.
"""

import hybridflow.mcore.bootstrap  # noqa: F401
