"""The algorithms of runs, one file each. A flow is an async function of a `Run`, and reads from top
to bottom like the dataflow figure of its paper."""
