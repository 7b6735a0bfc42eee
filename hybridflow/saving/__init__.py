"""Checkpoints. All training backends use the same format: one file per rank with rectangles of
global tensors, and a manifest that is written last.
"""
