"""The built-in agent loops, one per file. `base.py` defines the arguments of a loop and the
decorator that registers loops.
"""
