"""Checks for one GPU: `make gpu`."""
