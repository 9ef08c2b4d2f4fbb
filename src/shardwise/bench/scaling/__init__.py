"""Throughput against the number of ranks, measured and extrapolated."""
