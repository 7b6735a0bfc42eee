"""The only room that imports megatron: build, forward/backward, log-probs, checkpoints, and what Megatron needs to run without CUDA.

Import order matters: `hybridflow.mcore.cpu_compat.install()` must run before anything of megatron is imported where there is no CUDA; the
modules here that import megatron at their top call it first through `hybridflow.mcore.bootstrap`.
"""
