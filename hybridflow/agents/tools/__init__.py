"""Tools that a policy may call, one file each; `base.py` says what a tool is and how it is
registered."""
