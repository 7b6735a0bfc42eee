"""Inference without a trainer: `hybridflow eval` and `hybridflow serve` start engines on this
machine from a checkpoint, an export or a Hugging Face folder.
"""
