"""Advantage estimators, one file each; `base.py` says what an estimator is given and what it
returns."""
