"""Trackers that store a run's metrics, one module each. `base.py` defines the protocol."""
