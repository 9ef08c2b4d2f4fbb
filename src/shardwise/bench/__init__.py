"""Benchmarks that users run on their own machine, with raw samples kept."""
