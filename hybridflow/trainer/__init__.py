"""The training loop on the driver: phases, checkpoints and resuming, validation, metrics."""
