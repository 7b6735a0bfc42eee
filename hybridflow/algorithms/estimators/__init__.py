"""The built-in advantage estimators, one per file. `base.py` defines their inputs and outputs."""
