"""Checkpoints, in the same format for every training backend: rectangles of global tensors, one
file per rank, and a manifest that is written last."""
