"""Benchmarks for the user's machine; raw samples are saved."""
