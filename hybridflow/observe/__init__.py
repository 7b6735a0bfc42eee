"""A run's output: terminal progress, metrics, timeline, rollout dumps, environment, HTML report."""
