"""An engine based on transformers' `generate`, running in the trainer's process."""
