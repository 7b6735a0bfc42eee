"""`hybridflow watch`: a live page about a run, built from its folder."""
