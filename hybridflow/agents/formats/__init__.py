"""The built-in tool-call formats, one per file. `base.py` defines the interface of a format and the
decorator that registers formats.
"""
