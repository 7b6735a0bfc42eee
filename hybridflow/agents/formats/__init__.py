"""Tool-call formats, one file each. `base.py` defines the interface of a format and its
registration.
"""
