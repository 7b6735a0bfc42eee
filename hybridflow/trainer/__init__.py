"""The loop on the driver: phases, checkpoint and resume, validation, metrics."""
