"""Advantage estimators, one file each; `base.py` defines an estimator's inputs and outputs."""
