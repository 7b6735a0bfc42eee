"""Environments, one file each. `base.py` defines the protocol and its registration."""
