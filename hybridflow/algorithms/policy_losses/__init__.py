"""Policy losses, one file each; `base.py` says what a loss is given and what it returns."""
