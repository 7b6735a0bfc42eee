"""Agent loops, one file each; `base.py` says what a loop is given and how it is registered."""
