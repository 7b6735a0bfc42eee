"""Verifiers, one file each; `base.py` says what a verifier is given and how it is registered."""
