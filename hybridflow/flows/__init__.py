"""Flows, the algorithms of runs, one file each. A flow is an async function that takes a `Run`, and
reads from top to bottom like the dataflow figure in its paper."""
