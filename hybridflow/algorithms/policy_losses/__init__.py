"""Policy losses, one file each; `base.py` defines a loss's inputs and outputs."""
