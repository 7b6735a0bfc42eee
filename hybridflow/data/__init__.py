"""Data: preparation, parquet datasets, the resumable sampler, packing under a token budget."""
