"""What a run shows and leaves behind: terminal progress, metrics, timeline, rollout dumps,
environment, HTML report."""
