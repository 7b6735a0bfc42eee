"""Verifiers, one file each. `base.py` defines the interface of a verifier and its registration."""
