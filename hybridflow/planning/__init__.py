"""The dry run: predicts a job's memory, time and placement from its configuration alone. It does
not import torch or start any process."""
