"""The built-in flows, one per file. A flow is the training algorithm of a run: an async function
that takes a `Run` and reads from top to bottom like the dataflow figure in its paper.
"""
