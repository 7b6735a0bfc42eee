"""The built-in tools that the policy may call, one per file. `base.py` defines the interface of a
tool and the decorator that registers tools.
"""
