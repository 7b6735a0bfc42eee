"""Agent loops, one file each. `base.py` defines a loop's arguments and the registration."""
