"""Rollouts on the driver: requests, conversations, weight sync, engine recovery and evaluation."""
