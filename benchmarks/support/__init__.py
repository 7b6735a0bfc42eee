"""What the benchmarks share: the same conditions on both sides, the peer, interleaving, and the result files."""
