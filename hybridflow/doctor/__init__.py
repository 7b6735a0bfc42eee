"""The checks of `hybridflow doctor`, which run before a device is allocated: this machine, and a
model folder."""
