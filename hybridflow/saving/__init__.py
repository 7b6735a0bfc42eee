"""Checkpoints as every training backend writes them: rectangles of global tensors, one file a rank,
a manifest last."""
