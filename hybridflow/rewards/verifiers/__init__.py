"""The built-in verifiers, one per file. `base.py` defines the interface of a verifier and the
decorator that registers verifiers.
"""
