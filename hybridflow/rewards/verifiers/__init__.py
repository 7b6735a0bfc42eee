"""Verifiers, one file each. `base.py` defines a verifier's interface and the registration."""
