"""The whole system from Python: `hybridflow.Run`."""
