"""Trackers, one file each: what keeps the metrics of a run. `base.py` says what a tracker does."""
