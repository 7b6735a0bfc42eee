"""Environments, one file each; `base.py` says what one is and how it is registered."""
