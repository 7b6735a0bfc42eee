"""The dry run: memory, time and placement of a job, from its configuration alone. Imports no torch
and starts nothing."""
