"""The checks that `hybridflow doctor` runs on this machine and on a model folder, before any device
is allocated."""
