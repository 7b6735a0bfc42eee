"""How answers write calls of tools, one file each; `base.py` says what a format is and how it is
registered."""
