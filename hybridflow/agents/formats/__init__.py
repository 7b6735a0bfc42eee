"""Formats of tool calls in answers, one file each. `base.py` defines a format and its
registration."""
