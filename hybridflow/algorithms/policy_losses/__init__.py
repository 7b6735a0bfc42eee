"""The built-in policy losses, one per file. `base.py` defines their inputs and outputs."""
