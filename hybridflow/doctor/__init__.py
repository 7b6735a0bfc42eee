"""What `hybridflow doctor` looks at before a device is held: this machine, and a model folder."""
