"""Rollouts as the driver sees them: weight sync, recovery of engines, evaluation."""
