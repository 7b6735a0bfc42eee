"""The output of a run: terminal progress, metrics, timeline, dumps, environment, HTML report."""
