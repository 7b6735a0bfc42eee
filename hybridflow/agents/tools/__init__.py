"""Tools that the policy may call, one file each. `base.py` defines the interface of a tool and its
registration."""
