"""Throughput over devices: measured, taken apart, predicted."""
