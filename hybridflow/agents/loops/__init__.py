"""Agent loops, one file each. `base.py` defines the arguments of a loop and its registration."""
