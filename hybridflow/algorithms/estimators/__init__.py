"""Advantage estimators, one file each; `base.py` defines their inputs and outputs."""
