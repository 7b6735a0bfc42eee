"""The Python API: `hybridflow.Run`."""
