"""The algorithms of runs, one file each: a flow is an async function over a `Run`, and reads from
top to bottom like the dataflow figure of its paper."""
