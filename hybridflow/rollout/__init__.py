"""Rollouts from the driver's side: requests, conversations, weight sync, engine recovery and
evaluation."""
