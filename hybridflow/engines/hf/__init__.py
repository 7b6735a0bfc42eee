"""transformers' `generate` as an engine, in the trainer's process."""
