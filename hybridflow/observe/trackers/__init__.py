"""Trackers, which store a run's metrics, one file each. `base.py` defines the protocol."""
