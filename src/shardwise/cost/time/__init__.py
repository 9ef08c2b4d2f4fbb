"""Predicted seconds: kernels, collectives, overlap, pipeline and optimizer."""
