"""The output of a run: terminal progress, metrics, a timeline, dumps, environment information and
an HTML report."""
