"""The built-in environments, one per file. `base.py` defines the Environment protocol and the
decorator that registers environments.
"""
