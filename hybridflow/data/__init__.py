"""Dataset preparation, tokenized datasets, a resumable sampler, and packing of sequences under a
token budget.
"""
