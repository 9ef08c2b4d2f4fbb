"""Bandwidth and latency of collectives on the axes of a plan."""
