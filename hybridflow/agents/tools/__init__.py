"""Tools that the policy may call, one file each. `base.py` defines a tool and its registration."""
