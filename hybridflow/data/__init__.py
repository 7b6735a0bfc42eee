"""Data: preparation, parquet datasets, a resumable sampler, and packing under a token budget."""
